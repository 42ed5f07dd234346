const scrolls = (e) => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
const boxed = (e) => e !== null && (scrolls(e) || boxed(e.parentElement));
const named = (e) => `${e.closest("figure")?.id ?? e.tagName}: ${e.textContent.trim().slice(0, 60)}`;
const shown = (svg) => [...svg.querySelectorAll("text")]
  .map((text) => [text, text.getBoundingClientRect()])
  .filter(([text, at]) => at.width && text.textContent !== "×" && getComputedStyle(text).opacity !== "0");
const covers = (a, b) =>
  Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4;
const measure = () => {
  const width = document.documentElement.clientWidth, wide = [], cut = [], covered = [];
  for (const e of document.querySelectorAll("main *:not(svg *)")) {
    const at = e.getBoundingClientRect();
    if (at.width && at.right > width + 1 && !boxed(e.parentElement)) wide.push(named(e));
    if (e.dataset.chart && e.parentElement.scrollWidth > e.parentElement.clientWidth + 1) wide.push(`${named(e)} ${e.parentElement.scrollWidth}`);
  }
  // Numbers of a table are cut where it scrolls on a narrow page.
  if (width < 560) for (const e of document.querySelectorAll(".scroll > table"))
    if (e.parentElement.scrollWidth > e.parentElement.clientWidth + 1) wide.push(`table ${named(e)}`);
  for (const svg of document.querySelectorAll("svg.marks")) {
    const box = svg.getBoundingClientRect(), texts = shown(svg);
    for (const [text, at] of texts) if (at.right > box.right + 1 || at.left < box.left - 1) cut.push(named(text));
    texts.forEach(([one, a], i) => texts.slice(i + 1).forEach(([two, b]) => {
      if (covers(a, b)) covered.push(`${named(one)} / ${named(two)}`);
    }));
  }
  parent.postMessage(JSON.stringify({ width, reaches: document.documentElement.scrollWidth, wide, cut, covered }), "*");
};
const wait = () => setTimeout(document.documentElement.classList.contains("done") ? measure : wait, 200);
document.addEventListener("DOMContentLoaded", () => document.querySelectorAll("details.part").forEach((part) => { part.open = true; }));
wait();
