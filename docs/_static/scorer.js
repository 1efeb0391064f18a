// How the site's search finds and ranks: the users' words in index entries first, guides next, internals last.
const GUIDES = [
  "how-do-i", "quick-start", "tutorial", "install", "why-waiting", "coming-from", "frameworks", "tuning", "sizing",
  "python", "troubleshooting", "stalls", "ranks-disagree", "wrong-samples", "refused-shards", "no-answer",
  "out-of-space",
];
const INTERNALS = ["architecture", "benchmarks", "changelog", "contributing", "releasing", "semantics"];

// Words of questions that say nothing about the answer; Sphinx would look for a page that has all of them.
const OF_QUESTIONS = [
  "best", "does", "get", "go", "how", "make", "many", "much", "need", "set", "should", "use", "want", "way", "work",
  "would",
];

// A phrase counts as found if it has at least this share of the words in common with what was typed.
const LEAST_LIKENESS = 0.25;

function score(result) {
  const [page, title, anchor, , score, , kind] = result;
  if (kind === "index" && anchor) result[1] = question(page, title, anchor);
  return score + (GUIDES.includes(page) ? 4 : 0) - (INTERNALS.includes(page) ? 20 : 0);
}

// An entry is shown as the question that it leads to, as a match of its title would be.
function question(page, title, anchor) {
  const { alltitles, docnames } = Search._index;
  const here = ([file, id]) => docnames[file] === page && `#${id}` === anchor;
  const found = Object.keys(alltitles).find((each) => alltitles[each].some(here));
  return found ? `${title} > ${found}` : title;
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

// The stems of a phrase's words that say something.
function stems(phrase) {
  const stemmer = new Stemmer();
  const words = phrase.toLowerCase().match(/[\p{L}\p{N}_]+/gu) || [];
  return new Set(words.filter((word) => !stopwords.has(word)).map((word) => stemmer.stemWord(word)));
}

// From 0, nothing in common, to 1, the same words in any order.
function likeness(phrase, terms) {
  const words = stems(phrase);
  const common = [...words].filter((word) => terms.has(word)).length;
  return common && (common * common) / (words.size * terms.size);
}

// Index entries and titles that have words of the query, in any order, as results of Sphinx's own shape.
function alike(terms) {
  const { alltitles, docnames, filenames, indexentries, titles } = Search._index;
  const results = [];
  const add = (phrase, places, kind) => {
    const share = likeness(phrase, terms);
    if (share < LEAST_LIKENESS) return;
    for (const [file, id] of places) {
      const title = kind === "title" && titles[file] !== phrase ? `${titles[file]} > ${phrase}` : titles[file];
      const result = [docnames[file], title, id ? `#${id}` : "", null, Math.round(90 * share), filenames[file], kind];
      result[4] = score(result);
      results.push(result);
    }
  };
  for (const [phrase, places] of Object.entries(indexentries)) add(phrase, places, "index");
  for (const [phrase, places] of Object.entries(alltitles)) add(phrase, places, "title");
  return results;
}

// Pages that have any of the words, those with most of them last, for a query that no page has all words of.
function withAny(terms) {
  const found = new Map();
  for (const term of terms) {
    for (const result of Search.performTermsSearch(new Set([term]), new Set())) {
      const before = found.get(result[0]);
      if (before) before[4] += result[4];
      else found.set(result[0], result);
    }
  }
  for (const result of found.values()) result[4] = score(result);
  return [...found.values()];
}

// Sphinx shows the last result first. Of several for one place, the best is kept.
function merged(results) {
  const best = new Map();
  for (const result of results) {
    const place = result[0] + result[2];
    if (!best.has(place) || best.get(place)[4] < result[4]) best.set(place, result);
  }
  return [...best.values()].sort((one, other) => one[4] - other[4] || (one[1] < other[1] ? 1 : -1));
}

OF_QUESTIONS.forEach((word) => stopwords.add(word));

// This runs after Sphinx's own script has been read, and before it looks at the query.
const sphinxSearch = Search._performSearch;
Search._performSearch = (query, terms, ...others) => {
  const exact = sphinxSearch(query, terms, ...others);
  const loose = exact.length ? [] : withAny(terms);
  return merged([...loose, ...exact, ...alike(stems(query))]);
};
