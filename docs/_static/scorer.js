// How the site's search ranks: the users' words in index entries (100) first, guides next, internals last.
const GUIDES = ["how-do-i", "first-steps", "coming-from", "troubleshooting", "frameworks", "tuning", "sizing", "python"];
const INTERNALS = ["architecture", "benchmarks", "changelog", "contributing", "releasing", "semantics"];

function score(result) {
  const [page, title, anchor, , score, , kind] = result;
  if (kind === "index" && anchor) {
    // an entry is shown as the question that it leads to, as a match of its title would be
    const { alltitles, docnames } = Search._index;
    const here = ([file, id]) => docnames[file] === page && `#${id}` === anchor;
    const question = Object.keys(alltitles).find((each) => alltitles[each].some(here));
    result[1] = question ? `${title} > ${question}` : title;
  }
  return score + (GUIDES.includes(page) ? 4 : 0) - (INTERNALS.includes(page) ? 20 : 0);
}

var Scorer = {
  score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
