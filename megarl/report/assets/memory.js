// GPU memory of each phase beside what was predicted.

const GIB = 2 ** 30;

const Memory = {
  title: "Memory",

  there() { return report.runs.some((run) => this.phases(run).length); },

  phases(run) {
    const order = Object.keys(PHASE_COLORS), place = (phase) => (order.indexOf(phase) + 1) || Infinity;
    return Object.keys(run.curves.columns).map((name) => /^memory\/(.+)_gib$/.exec(name)?.[1]).filter(Boolean)
      .sort((a, b) => place(a) - place(b) || 0);
  },

  show(main) {
    const runs = shownRuns().filter((run) => this.phases(run).length);
    main.replaceChildren(...runs.map((run) => this.panel(run)));
    if (!runs.length) main.append(el("p", { class: "empty" }, "None of these runs used a GPU."));
  },

  panel(run) {
    const budget = run.memory, capacity = budget ? budget.bytes / GIB : 0;
    const rows = this.phases(run).map((phase) => {
      const values = run.curves.columns[`memory/${phase}_gib`][1].filter((v) => v !== null);
      const items = budget?.phases[phase];
      const predicted = items ? Object.values(items).reduce((a, b) => a + b, 0) / GIB : null;
      return { phase, peak: values.reduce((a, b) => Math.max(a, b), 0), last: values.at(-1), predicted, items };
    });
    const most = Math.max(capacity, ...rows.map((row) => Math.max(row.peak, row.predicted ?? 0)));
    const sizes = (row) => ({ peak: row.peak, "last step": row.last, predicted: row.predicted,
      "peak − predicted": row.predicted === null ? null : row.peak - row.predicted });
    const gib = (value) => value === null || value === undefined ? "–" : `${value.toFixed(2)} GiB`;
    return el("div", { class: "panel", "data-run": run.name }, el("h2", {}, run.name,
      budget ? `: ${budget.accelerator}, ${gib(capacity)}` : ""),
    el("table", { class: "plain stacked" }, el("tr", {}, el("th", {}, "phase"), el("th"),
      Object.keys(sizes(rows[0])).map((name) => el("th", { class: "num" }, name))),
    rows.map((row) => el("tr", { title: row.items ? Object.entries(row.items).sort((a, b) => b[1] - a[1])
      .map(([name, bytes]) => `${name}: ${gib(bytes / GIB)}`).join("\n") : "" },
    el("td", {}, row.phase), el("td", {}, el("div", { class: "gauge" },
      el("b", { style: { "--c": phaseColor(row.phase), width: `${100 * row.peak / most}%` } }),
      row.predicted === null ? "" : el("u", { style: { left: `calc(${100 * row.predicted / most}% - 1px)` } }))),
    Object.entries(sizes(row)).map(([name, value]) => el("td", { class: "num", "data-label": name }, gib(value)))))),
    el("div", { class: "legend" }, el("span", {}, budget
      ? "Bars: the fullest GPU's peak over all steps, of its memory. Line: predicted."
      : "Bars: the fullest GPU's peak over all steps. The run folder has no prediction.")));
  },
};
