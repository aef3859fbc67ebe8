/* Order of search results: pages that help with a task before lab notes. The numbers are Sphinx's own but for `score`. */
var Scorer = {
  score: function (result) {
    var name = result[0];
    var kinds = { tutorials: 6, "how-to": 8, reference: 4, explanation: 2, lab: -20 };
    var kind = name.split("/")[0];
    return result[4] + (kind in kinds ? kinds[kind] : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
