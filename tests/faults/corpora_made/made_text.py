"""Made text in several languages and scripts: frequent words of each language in random order, all from a seed.

The words are real, so that what detects encodings and languages sees real letters; the order is random, so that two texts share no n-gram
but by chance.
"""

import random
from dataclasses import dataclass

WORDS = {
    "en": (
        "time person year way day thing man world life hand part child eye woman place work week case point government company "
        "number group problem fact house service friend father power hour game line end member law car city community name "
        "president team minute idea body information nothing ago right lead social watch together follow around parent only "
        "stop face anything create public already speak others read level allow add office spend door health art war history "
        "party within grow result open change morning walk reason low win research girl guy early food before moment himself "
        "air teacher force offer"
    ),
    "de": (
        "zeit jahr mensch tag straße haus größe frau kind welt leben arbeit woche beispiel frage länder stadt teil könig stunde "
        "mädchen brücke wasser tür über für können müssen schön früh später natürlich wäre hätte möchte würde gegenüber während "
        "zurück fünf zwölf gehören führen öffnen hören erklären verändern völlig plötzlich nämlich größer kürzlich süden grün "
        "weiß heißen schließen füße grüße bücher dörfer vögel söhne töchter wörter gebäude fläche nähe wärme kälte höhe tiefe "
        "länge kräfte mächte ergebnis geschichte"
    ),
    "fr": (
        "année homme femme jour pays côté tête être même après déjà très où voilà français école église élève étude forêt "
        "fenêtre fête hôtel hôpital île leçon maître mère père frère musée numéro opéra pièce première problème qualité réponse "
        "rivière santé siècle société sœur théâtre université vérité village ville voiture éclair énergie équipe état été "
        "étoile évêque façon garçon reçu sûr dès près espèce manière lumière matière système modèle règle célèbre général idée "
        "journée pensée arrivée entrée durée"
    ),
    "pl": (
        "człowiek życie świat dzień ręka głowa słowo miłość książka kobieta mężczyzna dziecko później także właśnie między może "
        "więcej pieniądze źródło łąka żołnierz święto śnieg ćwiczenie gałąź wąż ząb dąb jabłko łódź miesiąc tydzień godzina "
        "pięć dziesięć sześć dziewięć piękny zły dobry szczęście wiadomość odpowiedź powieść część ilość jakość młody późny "
        "różny żółty czerwień błękit zieleń przyjaźń państwo społeczeństwo wojna pokój król królowa rzeka morze góra ogień "
        "ziemia"
    ),
    "cs": (
        "člověk život svět den ruka hlava slovo láska kniha žena muž dítě později také právě mezi může více peníze zdroj louka "
        "voják svátek sníh cvičení větev had zub jablko loď měsíc týden hodina pět deset šest devět krásný zlý dobrý štěstí "
        "zpráva odpověď část jakost mladý pozdní různý žlutý červený modrý zelený přátelství stát společnost válka mír král "
        "královna řeka moře hora oheň země dům příklad řeč věc čas město škola učitel žák dveře okno stůl židle ulice náměstí"
    ),
    "ru": (
        "время год человек дело жизнь день рука раз работа слово место лицо друг глаз вопрос дом сторона страна мир случай "
        "голова ребенок сила конец вид система часть город отношение женщина деньги земля машина вода отец проблема час право "
        "нога решение дверь образ история власть закон война бог голос тысяча книга возможность результат ночь стол имя область "
        "статья число компания народ жена группа развитие процесс суд условие средство начало свет пора путь душа уровень форма "
        "связь минута улица вечер качество мысль"
    ),
    "uk": (
        "час рік людина справа життя день рука раз робота слово місце обличчя друг око питання дім сторона країна світ випадок "
        "голова дитина сила кінець вигляд система частина місто відношення жінка гроші земля машина вода батько проблема година "
        "право нога рішення двері історія влада закон війна голос тисяча книга можливість результат ніч стіл область стаття "
        "число компанія народ дружина група розвиток процес умова засіб початок світло шлях душа рівень форма зв'язок хвилина "
        "вулиця вечір якість думка їжа їхній її єдність"
    ),
    "el": (
        "χρόνος άνθρωπος ζωή ημέρα χέρι κόσμος λέξη τόπος πρόσωπο φίλος μάτι ερώτηση σπίτι πλευρά χώρα περίπτωση κεφάλι παιδί "
        "δύναμη τέλος είδος σύστημα μέρος πόλη σχέση γυναίκα χρήματα γη αυτοκίνητο νερό πατέρας πρόβλημα ώρα δικαίωμα πόδι λύση "
        "πόρτα εικόνα ιστορία εξουσία νόμος πόλεμος φωνή χιλιάδες βιβλίο δυνατότητα αποτέλεσμα νύχτα τραπέζι όνομα περιοχή "
        "άρθρο αριθμός εταιρεία λαός ομάδα ανάπτυξη διαδικασία συνθήκη μέσο αρχή φως δρόμος ψυχή επίπεδο μορφή σύνδεση λεπτό "
        "βράδυ ποιότητα σκέψη θάλασσα βουνό ουρανός"
    ),
    "tr": (
        "zaman yıl insan iş hayat gün el söz yer yüz arkadaş göz soru ev taraf ülke dünya durum baş çocuk güç son tür sistem "
        "bölüm şehir ilişki kadın para toprak araba su baba sorun saat hak ayak çözüm kapı görüntü tarih iktidar yasa savaş ses "
        "bin kitap olanak sonuç gece masa isim bölge makale sayı şirket halk grup gelişme süreç koşul araç başlangıç ışık yol "
        "ruh düzey biçim bağ dakika sokak akşam nitelik düşünce deniz dağ gökyüzü ağaç çiçek kuş köpek güneş yıldız rüzgâr "
        "yağmur kış ılık ığdır şöyle değil için çünkü"
    ),
    "ar": (
        "الوقت السنة الإنسان العمل الحياة اليوم اليد الكلمة المكان الوجه الصديق العين السؤال البيت الجانب البلد العالم الحالة "
        "الرأس الطفل القوة النهاية النوع النظام الجزء المدينة العلاقة المرأة المال الأرض السيارة الماء الأب المشكلة الساعة الحق "
        "القدم الحل الباب الصورة التاريخ السلطة القانون الحرب الصوت الكتاب النتيجة الليل الطاولة الاسم المنطقة المقالة العدد "
        "الشركة الشعب المجموعة التطور العملية الشرط الوسيلة البداية الضوء الطريق الروح المستوى الشكل الدقيقة الشارع المساء "
        "الجودة الفكرة البحر الجبل السماء الشجرة"
    ),
    "he": (
        "זמן שנה אדם עבודה חיים יום יד מילה מקום פנים חבר עין שאלה בית צד ארץ עולם מקרה ראש ילד כוח סוף סוג מערכת חלק עיר יחס "
        "אישה כסף אדמה מכונית מים אבא בעיה שעה זכות רגל פתרון דלת תמונה היסטוריה שלטון חוק מלחמה קול אלף ספר אפשרות תוצאה לילה "
        "שולחן שם אזור מאמר מספר חברה עם קבוצה פיתוח תהליך תנאי אמצעי התחלה אור דרך נשמה רמה צורה קשר דקה רחוב ערב איכות מחשבה "
        "ים הר שמיים עץ פרח ציפור כלב"
    ),
    "hi": (
        "समय वर्ष व्यक्ति काम जीवन दिन हाथ शब्द स्थान चेहरा मित्र आँख प्रश्न घर पक्ष देश दुनिया मामला सिर बच्चा शक्ति अंत "
        "प्रकार प्रणाली भाग शहर संबंध महिला धन भूमि गाड़ी पानी पिता समस्या घंटा अधिकार पैर समाधान द्वार चित्र इतिहास सत्ता "
        "कानून युद्ध आवाज़ हज़ार पुस्तक संभावना परिणाम रात मेज़ नाम क्षेत्र लेख संख्या लोग समूह विकास प्रक्रिया शर्त साधन आरंभ "
        "प्रकाश मार्ग आत्मा स्तर रूप मिनट गली शाम गुण विचार समुद्र पर्वत आकाश वृक्ष फूल पक्षी कुत्ता सूर्य"
    ),
    "ko": (
        "시간 사람 세계 생활 하루 손가락 단어 장소 얼굴 친구 질문 집안 나라 경우 머리 아이 힘찬 마지막 종류 체계 부분 도시 관계 "
        "여자 돈벌이 땅끝 자동차 바닷물 아버지 문제 권리 다리 해결 대문 그림 역사 권력 법률 전쟁 목소리 책상 가능성 결과 밤하늘 "
        "탁자 이름 지역 기사 숫자 회사 국민 집단 발전 과정 조건 수단 시작 빛깔 길목 영혼 수준 형태 연결 거리 저녁 품질 생각 "
        "바다 산맥 하늘 나무 꽃잎 새벽 강아지 태양 별자리 바람 겨울"
    ),
}
# Characters of scripts without spaces, of which texts are made by the character: each is a word to the deduplication.
CHARACTERS = {
    "zh": (
        "的一是不了人我在有他这为之大来以个中上们到说国和地也子时道出而要于就下得可你年生自会那后能对着事其里所去行过家十用发天如然作方成者多日都三小"
        "军二无同么经法当起与好看学进种将还分此心前面又定见只主没公从知使问高理电想老点新实体路安水火山河海文书"
    ),
    "ja": (
        "のにはをたがでてとしれさあるいるもするからなこととしていやれるなどこの日本人年大学中会国一生出来時分上前後見行者間事社手地方新月東京体全部場合動"
        "物自力学長家高入立小女心世界気持話語名金水火木土山川海空花鳥風春夏秋冬朝昼夜ひらがなカタカナコンピュータデータ"
    ),
}
# Legacy encodings that texts of a language are found in, besides UTF-8 and UTF-16.
LEGACY = {
    "de": ("cp1252",),
    "fr": ("cp1252",),
    "pl": ("cp1250", "iso8859-2"),
    "cs": ("cp1250", "iso8859-2"),
    "ru": ("cp1251", "koi8-r"),
    "uk": ("cp1251",),
    "el": ("cp1253", "iso8859-7"),
    "tr": ("cp1254",),
    "ar": ("cp1256",),
    "he": ("cp1255",),
    "ko": ("cp949",),
    "zh": ("gb18030", "big5"),
    "ja": ("shift_jis", "euc_jp"),
}
LANGUAGES = (*WORDS, *CHARACTERS)
MARKS = {"zh": ("，", "。"), "ja": ("、", "。"), "ar": ("،", "."), "hi": (",", "।")}


@dataclass(frozen=True)
class Text:
    """Words of a language, and how they are written: sentences of `lengths` words, or characters without spaces."""

    language: str
    words: tuple[str, ...]

    def render(self) -> str:
        """Sentences of 12 words with a capital letter and marks, five in a paragraph; the words alone decide the n-grams."""
        comma, stop = MARKS.get(self.language, (",", "."))
        space = "" if self.language in CHARACTERS else " "
        lines = []
        for start in range(0, len(self.words), 12):
            some = list(self.words[start : start + 12])
            if len(some) > 6:
                some[5] += comma
            line = space.join(some) + stop
            lines.append(line[0].upper() + line[1:] if len(line[0].upper()) == 1 else line)
        paragraphs = [space.join(lines[start : start + 5]) for start in range(0, len(lines), 5)]
        return "\n\n".join(paragraphs)


def made_text(draw: random.Random, language: str, length: int) -> Text:
    """`length` random words, or characters, of a language. A number is among 30 words, so that few n-grams are shared by chance."""
    if language in CHARACTERS:
        return Text(language, tuple(draw.choices([*dict.fromkeys(CHARACTERS[language])], k=length)))
    words = draw.choices(WORDS[language].split(), k=length)
    for place in range(draw.randrange(30), length, 30):
        words[place] = str(draw.randrange(100_000))
    return Text(language, tuple(words))
