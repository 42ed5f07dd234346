// A table wider than its page becomes a block a row, each figure behind its column's title: no number is cut.
"use strict";
const fit = () => {
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    delete table.dataset.wide;
    const box = table.closest(".md-typeset__scrollwrap");
    if (window.innerWidth > 760 || !box || box.scrollWidth <= box.clientWidth + 1) continue;
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
    for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, at) => { cell.dataset.head = heads[at]; });
    table.dataset.wide = "";
  }
};
// A line never ends within the name of an option, such as --seq-q.
const join = () => {
  for (const code of document.querySelectorAll(".md-typeset :not(pre) > code")) {
    if (code.childElementCount) continue;
    code.innerHTML = code.innerHTML.replace(/(^|\s)(--?[a-z][\w-]*)/gi, '$1<span class="option">$2</span>');
  }
};
document.addEventListener("DOMContentLoaded", () => {
  join();
  setTimeout(fit); // once the theme has put each table in its box
  window.addEventListener("resize", fit);
  for (const folded of document.querySelectorAll("details")) folded.addEventListener("toggle", fit);
});
