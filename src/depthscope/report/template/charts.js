// The charts, and the block under the pointer in all of them.
page.signal = function (name, value) {
  for (const view of Object.values(page.views)) {
    try { view.signal(name, value).runAsync(); } catch { /* a chart without it */ }
  }
};

page.hover = function (block) {
  if (block === page.hovered) return;
  page.hovered = block;
  document.documentElement.dataset.block = block;
  page.signal("hovered", block);
  if (page.drawTable) page.drawTable();
};

// The block at the pointer: that of the mark there, or, where blocks are on an axis, the nearest.
page.blockAt = function (view, chart, box, event, item) {
  if (item && item.datum && Number.isInteger(item.datum.block)) return item.datum.block;
  const svg = box.querySelector("svg");
  if (!chart.block || !svg) return -1;
  const place = svg.getBoundingClientRect(), grow = svg.viewBox.baseVal.width / place.width || 1;
  const at = chart.block === "x"
    ? (event.clientX - place.left) * grow - view.origin()[0]
    : (event.clientY - place.top) * grow - view.origin()[1];
  const across = chart.block === "x" ? view.width() : view.height();
  const relative = chart.block === "x" && page.data.depth > 1 && view.scale("x").domain()[1] <= 1;
  if (relative || at < -4 || at > across + 4) return -1;
  return Math.max(0, Math.min(page.data.depth, Math.round(view.scale(chart.block).invert(at))));
};

// As many columns of a legend as the longest of its names leaves room for.
page.fitLegends = function (value, width) {
  if (value === null || typeof value !== "object") return;
  if (value.legend && value.legend.columns && value.scale && Array.isArray(value.scale.domain)) {
    const longest = Math.max(...value.scale.domain.map((name) => String(name).length));
    value.legend.columns = Math.max(1, Math.min(value.legend.columns, Math.floor(width / (6.3 * longest + 30))));
  }
  for (const part of Object.values(value)) page.fitLegends(part, width);
};

// What is folded is drawn too: every chart is as wide as the page lets a figure be.
page.drawCharts = async function () {
  const probe = document.querySelector(".chart");
  const figure = probe && probe.closest("figure");
  const inside = figure ? parseFloat(getComputedStyle(figure).paddingLeft) + parseFloat(getComputedStyle(figure).paddingRight) + 2 : 0;
  const main = getComputedStyle(document.querySelector("main"));
  const width = document.querySelector("main").clientWidth - parseFloat(main.paddingLeft) - parseFloat(main.paddingRight) - inside;
  for (const box of document.querySelectorAll(".chart")) {
    const chart = page.data.charts[box.dataset.chart];
    const spec = structuredClone(chart.spec);
    spec.datasets = Object.fromEntries(Object.entries(chart.uses).map(([name, where]) => [name, page.rows(name, where)]));
    spec.autosize = { type: "fit-x", contains: "padding" };
    spec.width = width;
    page.fitLegends(spec, width);
    const config = structuredClone(page.data.config);
    config.legend.labelLimit = width - 40;
    if (width < 520) {
      config.legend.orient = "top";
      if (spec.height === 260) spec.height = 190;  // so that a phone shows the first chart and what it means at once
    }
    delete spec.config;
    const drawn = await vegaEmbed(box, spec, { ast: true, renderer: "svg", actions: false, config, tooltip: { theme: "custom" } });
    page.views[box.dataset.chart] = drawn.view;
    drawn.view.addEventListener("pointermove", (event, item) => page.hover(page.blockAt(drawn.view, chart, box, event, item)));
    drawn.view.addEventListener("pointerdown", (event, item) => page.hover(page.blockAt(drawn.view, chart, box, event, item)));
    box.addEventListener("pointerleave", () => page.hover(-1));
    await new Promise((next) => setTimeout(next));  // the page stays alive between two charts
  }
};
