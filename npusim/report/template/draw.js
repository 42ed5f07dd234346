"use strict";
(() => {
  document.documentElement.classList.add("drawn");
  const { themes, charts } = JSON.parse(document.getElementById("charts").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const places = [...document.querySelectorAll("[data-chart]")];
  const draw = (place) => {
    const theme = themes[dark.matches ? "dark" : "light"];
    const columns = place.clientWidth < 600 ? 1 : theme.legend.columns;
    const spec = { ...charts[place.dataset.chart], config: { ...theme, legend: { ...theme.legend, columns } } };
    spec.autosize = { type: "fit-x", contains: "padding", resize: true };
    return vegaEmbed(place, spec, { renderer: "svg", actions: false, ast: true, tooltip: { theme: dark.matches ? "dark" : "light" } })
      .then(({ view }) => { place.view = view; place.querySelector("svg").setAttribute("aria-hidden", "true"); });
  };
  // One after the other, so that the page stays responsive; what is folded has no width, and is drawn once it opens.
  const all = async () => {
    for (const place of places) {
      if (place.closest("details:not([open])")) continue;
      await draw(place);
      await new Promise((next) => setTimeout(next));
    }
  };
  for (const part of document.querySelectorAll("details.part"))
    part.addEventListener("toggle", () => { if (part.open) part.querySelectorAll("[data-chart]").forEach(draw); });
  all().then(() => document.documentElement.classList.add("done"));
  dark.addEventListener("change", all);
})();
