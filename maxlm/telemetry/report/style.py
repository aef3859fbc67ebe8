"""CSS and JavaScript of the report. Colours after Okabe and Ito, distinguishable by the colour-blind: darker on white, lighter on black."""

COLORS = 8  # in the palette of the runs, --p0 to --p7; it repeats from the ninth run

CSS = """
:root{--bg:#fff;--panel:#f6f7f9;--ink:#1b1f24;--soft:#57606a;--rule:#d5dae0;
--p0:#0b66a8;--p1:#b84e00;--p2:#007a5a;--p3:#a3437e;--p4:#7a6200;--p5:#3a7fae;--p6:#5b4bb5;--p7:#444c56;
--good:#116b3c;--good-bg:#ddf3e4;--warn:#7a5200;--warn-bg:#fdf0cf;--bad:#a1151f;--bad-bg:#fde3e1}
@media(prefers-color-scheme:dark){:root{--bg:#0f1216;--panel:#181c22;--ink:#e8ebef;--soft:#a0a9b4;--rule:#333a44;
--p0:#5cb3f0;--p1:#f5914a;--p2:#3fcf9f;--p3:#e58fc0;--p4:#e3cf4a;--p5:#9bd0f2;--p6:#a99cf5;--p7:#b8c0ca;
--good:#7fe0a8;--good-bg:#12351f;--warn:#f0cc6a;--warn-bg:#3a2e0c;--bad:#ff9c95;--bad-bg:#431917}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
main{max-width:1160px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:2rem;line-height:1.2;margin:0 0 .6rem;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.6rem 0 .8rem;padding-top:1.1rem;border-top:1px solid var(--rule)}
h3{font-size:1rem;margin:1.2rem 0 .3rem;overflow-wrap:anywhere}
.kind{margin:0;color:var(--soft);font-size:.85rem;letter-spacing:.06em;text-transform:uppercase}
.lead{max-width:46em;margin:.2rem 0 .6rem}
.note,small,.unit{color:var(--soft);font-size:.85rem;font-weight:400}
p.note{margin:.3rem 0}
.chip{font-size:.8rem;font-weight:600;letter-spacing:0;padding:.15em .7em;border-radius:1em;vertical-align:middle;
background:var(--panel);color:var(--soft)}
.chip.good{background:var(--good-bg);color:var(--good)}.chip.warn{background:var(--warn-bg);color:var(--warn)}
.chip.bad{background:var(--bad-bg);color:var(--bad)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:10px;margin:1.4rem 0 0}
.cards div{background:var(--panel);border-radius:8px;padding:11px 12px}
dt{color:var(--soft);font-size:.85rem}dd{margin:0;font-size:1.08rem;letter-spacing:-.01em;font-weight:600;font-variant-numeric:tabular-nums;line-height:1.3}
.cards small{display:block;line-height:1.3;font-size:.78rem}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,360px),1fr));gap:26px 30px}
figure{margin:0}figcaption{font-weight:600;font-size:.95rem;margin-bottom:4px}
svg.chart{display:block;width:100%;height:auto;overflow:visible;touch-action:pan-y}
svg text{fill:var(--soft);font-size:12px;font-variant-numeric:tabular-nums}
.grid{stroke:var(--rule);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}
.line,.raw{fill:none;stroke:var(--c);stroke-width:1.9;stroke-linejoin:round;stroke-linecap:round}
.raw{stroke-width:1;opacity:.32}.dashed{stroke-dasharray:5 4;stroke-width:1.4}circle{fill:var(--c)}
.c0{--c:var(--p0)}.c1{--c:var(--p1)}.c2{--c:var(--p2)}.c3{--c:var(--p3)}.c4{--c:var(--p4)}.c5{--c:var(--p5)}.c6{--c:var(--p6)}.c7{--c:var(--p7)}
.swatch{display:inline-block;width:.8em;height:.8em;border-radius:3px;background:var(--c);margin-right:.45em;vertical-align:-.05em}
.legend{display:flex;flex-wrap:wrap;gap:.3em 1.3em;margin:.2rem 0 1rem;font-size:.9rem;align-items:center}
.loss{grid-column:1/-1;position:relative}.loss .legend{gap:.5em;margin:.2rem 0 0;color:var(--soft)}
.key{--c:var(--soft);width:22px;border-top:2px solid var(--c)}.key.dotted{border-top-style:dashed;margin-left:1em}
.key.c0{--c:var(--p0)}.key.c1{--c:var(--p1)}
.loss input{position:absolute;opacity:0}
.loss label{float:right;font-size:.85rem;padding:.1em .8em;border:1px solid var(--rule);color:var(--soft);cursor:pointer}
.loss label[for=log]{border-radius:0 1em 1em 0;margin-left:-1px}.loss label[for=linear]{border-radius:1em 0 0 1em}
.loss{display:grid;grid-template-columns:1fr auto auto}.loss>div,.loss>.legend{grid-column:1/-1}
.loss label{grid-row:1}.loss label[for=linear]{grid-column:2}.loss label[for=log]{grid-column:3}
.loss>div{grid-row:1;pointer-events:none}.loss>div svg{pointer-events:auto}
.loss .log{display:none}#log:checked~.log{display:block}#log:checked~.linear{display:none}
.loss input:checked+label{background:var(--panel);color:var(--ink);font-weight:600}
.loss input:focus-visible+label{outline:2px solid var(--p0)}
.loss label{align-self:start;z-index:1}
.bar{display:flex;height:26px;border-radius:6px;overflow:hidden;gap:1px;margin:.4rem 0 .7rem}
.part{background:var(--part)}.step{--part:var(--p2)}.lost{--part:var(--bad)}.init{--part:var(--p4)}.compile{--part:var(--p6)}
.wait_hosts{--part:var(--warn)}.restore{--part:var(--p5)}.data_wait{--part:var(--p1)}.save{--part:var(--p3)}.eval{--part:var(--p0)}
.hang{--part:var(--ink)}.elastic{--part:var(--good)}.down{--part:var(--rule)}
.keys{list-style:none;display:flex;flex-wrap:wrap;gap:.2em 1.6em;padding:0;margin:0 0 .6rem;font-size:.9rem}
.keys b{font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto;max-height:34rem;overflow-y:auto}
table{border-collapse:collapse;font-size:.9rem;min-width:min(100%,30rem)}
th,td{text-align:left;padding:.35rem 1.4rem .35rem 0;border-bottom:1px solid var(--rule);vertical-align:top;
font-variant-numeric:tabular-nums}
tbody th{font-weight:400;white-space:nowrap}thead th{position:sticky;top:0;background:var(--bg);color:var(--soft);font-weight:600}
.numbers td,.numbers thead th+th{text-align:right;padding:.35rem 0 .35rem 1.4rem}
.dot{display:inline-block;width:.6em;height:.6em;border-radius:50%;margin-right:.6em;background:var(--soft)}
.dot.start,.dot.stop{background:var(--p0)}.dot.save{background:var(--p2)}.dot.eval{background:var(--p6)}
.dot.skip,.dot.preempt{background:var(--p1)}.dot.rollback,.dot.killed,.dot.observer{background:var(--bad)}.dot.restore{background:var(--p3)}
code,pre{font:.85rem/1.5 ui-monospace,"SF Mono",Menlo,Consolas,monospace}
summary{cursor:pointer;padding:.3rem 0}pre{background:var(--panel);border-radius:8px;padding:14px 16px;overflow-x:auto;margin:.3rem 0 1rem}
#tip{position:fixed;pointer-events:none;background:var(--ink);color:var(--bg);font-size:.8rem;line-height:1.45;
padding:.35em .7em;border-radius:6px;
white-space:pre;font-variant-numeric:tabular-nums;z-index:9}
.restart{stroke:var(--c);stroke-width:1;stroke-dasharray:1 3;fill:none}.skip{fill:var(--bad)}.beyond{fill:var(--c)}
.legend svg{width:1em;height:1em;overflow:visible;margin-left:1em}
.cursor{stroke:var(--soft);stroke-dasharray:2 3}
@media(max-width:760px){main{padding:24px 16px}svg text{font-size:17px}
.loss>div{overflow-x:auto}.loss svg.chart{width:900px}.loss svg text{font-size:13px}}
@media print{.scroll{max-height:none}details{display:none}}
"""

# Only on pages about mixtures of experts. Both ends of the scale contrast with the background, in light and dark.
EXPERTS_CSS = """
:root{--h0:#0b2a4a;--h1:#2166ac;--h2:#67a9cf;--h3:#c3dfee;--h4:#f1f2f4;--h5:#fde0c8;--h6:#f4a264;--h7:#d6602d;--h8:#8c1d04}
@media(prefers-color-scheme:dark){:root{--h0:#d5ecff;--h1:#6db3e8;--h2:#3a76a8;--h3:#2b435a;--h4:#20262e;--h5:#54402f;--h6:#a05f2c;--h7:#ea8a3c;--h8:#ffd9b0}}
.h0{--c:var(--h0)}.h1{--c:var(--h1)}.h2{--c:var(--h2)}.h3{--c:var(--h3)}.h4{--c:var(--h4)}
.h5{--c:var(--h5)}.h6{--c:var(--h6)}.h7{--c:var(--h7)}.h8{--c:var(--h8)}
svg.heat{display:block;width:100%;height:auto;overflow:visible}
.heat path{stroke:var(--c);fill:none;shape-rendering:crispEdges}.ground{fill:var(--c)}
.scale .swatch{outline:1px solid var(--rule)}.wide{grid-column:1/-1}
.grid3{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr));gap:22px 24px}.maps{margin:.4rem 0 1.8rem}
.dot.alarm{background:var(--bad)}
"""

# The pointer shows the points of the main lines; a line without a point at that step says which step its own is of.
JS = """
const tip=document.getElementById('tip'),NS='http://www.w3.org/2000/svg';
const say=v=>v!==0&&(Math.abs(v)<1e-3||Math.abs(v)>=1e7)?v.toExponential(3):
  Number(v.toPrecision(4)).toLocaleString('en-US',{maximumFractionDigits:6});
const numbers=text=>text.split(' ').map(Number),count=step=>step.toLocaleString('en-US');
for(const svg of document.querySelectorAll('svg.chart')){
  const [L,T,W,H]=numbers(svg.dataset.plot);
  const lines=[...svg.querySelectorAll('g[data-label]')].map(g=>{
    const steps=numbers(g.dataset.steps),values=numbers(g.dataset.values);
    return {name:g.dataset.label,points:g.querySelector('.line').getAttribute('points').split(' ')
      .map((p,i)=>({x:Number(p.split(',')[0]),step:steps[i],value:values[i]}))}});
  const cursor=document.createElementNS(NS,'line');cursor.setAttribute('class','cursor');
  cursor.setAttribute('y1',T);cursor.setAttribute('y2',T+H);
  cursor.style.display='none';svg.append(cursor);
  const hide=()=>{tip.hidden=true;cursor.style.display='none'};
  svg.addEventListener('pointermove',e=>{
    const box=svg.getBoundingClientRect(),px=(e.clientX-box.left)*svg.viewBox.baseVal.width/box.width;
    if(px<L||px>L+W)return hide();
    const here=lines.filter(l=>l.points[0].x-8<=px&&px<=l.points[l.points.length-1].x+8);
    if(!here.length)return hide();
    const near=here.map(l=>({name:l.name,at:l.points.reduce((a,b)=>Math.abs(b.x-px)<Math.abs(a.x-px)?b:a)}));
    const at=near.map(n=>n.at).reduce((a,b)=>Math.abs(b.x-px)<Math.abs(a.x-px)?b:a);
    tip.textContent='step '+count(at.step)+'\\n'
      +near.map(n=>n.name+'  '+say(n.at.value)+(n.at.step===at.step?'':'  (step '+count(n.at.step)+')')).join('\\n');
    cursor.setAttribute('x1',at.x);cursor.setAttribute('x2',at.x);cursor.style.display='';tip.hidden=false;
    tip.style.left=Math.min(e.clientX+16,innerWidth-tip.offsetWidth-8)+'px';tip.style.top=Math.min(e.clientY+16,innerHeight-tip.offsetHeight-8)+'px';
  });
  svg.addEventListener('pointerleave',hide);
}
"""
