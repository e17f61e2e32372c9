// What is left: the theme, copying, the choices of runs, the filter of claims.
(function () {
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const follow = () => { root.dataset.theme = dark.matches ? "dark" : "light"; };
  follow();
  dark.addEventListener("change", follow);
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  });

  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("pre");
      try {
        await navigator.clipboard.writeText(code.textContent);
      } catch {  // where a browser gives a file no clipboard, the text is marked, to be copied by hand
        getSelection().selectAllChildren(code);
        document.execCommand("copy");
      }
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
  }

  const shown = document.getElementById("shown");
  if (shown) shown.addEventListener("change", () => page.signal("shown", shown.value));

  const buttons = [...document.querySelectorAll(".filter")];
  const search = document.getElementById("claim-search");
  function filter() {
    const chosen = buttons.filter((button) => button.getAttribute("aria-pressed") === "true").map((button) => button.dataset.verdict);
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const study of document.querySelectorAll(".study")) {
      const name = study.querySelector("h3").textContent.toLowerCase();
      let any = false;
      for (const row of study.querySelectorAll("tbody tr")) {
        const text = `${name} ${row.textContent.toLowerCase()}`;
        row.hidden = (chosen.length > 0 && !chosen.includes(row.dataset.verdict)) || !words.every((word) => text.includes(word));
        any = any || !row.hidden;
      }
      study.hidden = !any;
    }
  }
  for (const button of buttons) {
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
      filter();
    });
  }
  if (search) search.addEventListener("input", filter);

  window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((item) => { item.open = true; }));
  function unfold() {  // a link into what is folded opens it
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let around = target; around; around = around.parentElement) if (around.tagName === "DETAILS") around.open = true;
    if (target) target.scrollIntoView();
  }
  window.addEventListener("hashchange", unfold);
  document.addEventListener("click", (event) => { if (event.target.closest("a[href^='#']")) setTimeout(unfold); });
  unfold();
  const numbers = document.getElementById("numbers");
  if (numbers) numbers.addEventListener("toggle", () => page.drawTable && page.drawTable());
  page.showTable();
  page.drawCharts().then(
    () => { root.dataset.ready = "yes"; },
    (error) => { root.dataset.ready = "failed"; console.error(error); },
  );
})();
