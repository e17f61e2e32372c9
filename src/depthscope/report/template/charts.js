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
  if (at < -4 || at > across + 4) return -1;
  return Math.max(0, Math.min(page.data.depth, Math.round(view.scale(chart.block).invert(at))));
};

page.drawCharts = async function () {
  for (const box of document.querySelectorAll(".chart")) {
    const chart = page.data.charts[box.dataset.chart];
    const spec = structuredClone(chart.spec);
    spec.datasets = Object.fromEntries(Object.entries(chart.uses).map(([name, where]) => [name, page.rows(name, where)]));
    spec.autosize = { type: "fit-x", contains: "padding" };
    const config = structuredClone(page.data.config);
    const columns = Math.max(1, Math.floor(box.clientWidth / 250));
    JSON.stringify(spec, (key, value) => { if (key === "legend" && value && value.columns) value.columns = Math.min(value.columns, columns); return value; });
    const narrow = box.clientWidth < 520;
    if (narrow) config.legend.orient = "top";
    delete spec.config;
    const drawn = await vegaEmbed(box, spec, { ast: true, renderer: "svg", actions: false, config, tooltip: { theme: "custom" } });
    page.views[box.dataset.chart] = drawn.view;
    drawn.view.addEventListener("pointermove", (event, item) => page.hover(page.blockAt(drawn.view, chart, box, event, item)));
    drawn.view.addEventListener("pointerdown", (event, item) => page.hover(page.blockAt(drawn.view, chart, box, event, item)));
    box.addEventListener("pointerleave", () => page.hover(-1));
    await new Promise((next) => setTimeout(next));  // the page stays alive between two charts
  }
};
