// Curves of the runs, one card for each metric, grouped by prefix.

const Curves = {
  title: "Curves",
  search: "", smooth: 0.6, log: false, axis: "step", closed: new Set(),
  FIRST: ["reward/mean", "val/accuracy", "train/loss", "val/loss", "response/length_mean", "actor/entropy",
    "actor/grad_norm", "rollout/logp_gap_mean", "tokens_per_s", "timing/step_s"],

  show(main) {
    const search = el("input", { type: "search", placeholder: "Search metrics  (/)", value: this.search,
      "aria-label": "Search metrics", id: "search" });
    search.addEventListener("input", later(80, () => { this.search = search.value; this.draw(); }));
    const smooth = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: this.smooth, id: "smooth" });
    const said = el("span", {}, this.smooth.toFixed(2));
    smooth.addEventListener("input", () => {
      this.smooth = Number(smooth.value); said.textContent = this.smooth.toFixed(2); this.redraw();
    });
    const log = el("input", { type: "checkbox", checked: this.log, id: "log" });
    log.addEventListener("change", () => { this.log = log.checked; this.redraw(); });
    const axis = el("select", { id: "axis" }, option("step"), option("time", "hours"));
    axis.value = this.axis;
    axis.addEventListener("change", () => { this.axis = axis.value; this.redraw(); });
    this.body = el("div", { id: "curves" });
    this.count = el("span", { class: "count", id: "count" });
    main.replaceChildren(el("div", { class: "bar" }, search, el("label", {}, "smoothing", smooth, said),
      field("log scale", log), field("x", axis), this.count), this.body);
    this.draw();
  },

  names() {
    const all = new Set(shownRuns().flatMap((run) => Object.keys(run.curves.columns)));
    const words = this.search.toLowerCase().split(/\s+/).filter(Boolean);
    return [...all].filter((name) => words.every((word) => name.toLowerCase().includes(word)));
  },

  draw() {
    this.watch?.disconnect();
    this.watch = new IntersectionObserver((seen) => {
      for (const one of seen) { one.target.visible = one.isIntersecting; if (one.isIntersecting) this.paint(one.target); }
    }, { root: document.getElementById("main"), rootMargin: "200px" });
    const names = this.names(), groups = new Map();
    if (!this.search) {
      const first = this.FIRST.filter((name) => names.includes(name));
      if (first.length) groups.set("overview", first);
    }
    for (const name of names.sort()) {
      const group = name.includes("/") ? name.slice(0, name.indexOf("/")) : "run";
      groups.set(group, [...(groups.get(group) ?? []), name]);
    }
    this.cards = [];
    this.body.replaceChildren(...[...groups].map(([group, members]) => this.group(group, members)));
    if (!names.length) this.body.append(el("p", { class: "empty" }, this.search ? "No metric has this name."
      : "No metrics yet."));
    this.count.textContent = `${fmtWhole(names.length)} metrics`;
  },

  group(group, members) {
    const made = el("details", { class: "group", "data-group": group, open: !this.closed.has(group) },
      el("summary", {}, group, el("small", {}, String(members.length))),
      el("div", { class: "cards" }, members.map((name) => this.card(name))));
    made.addEventListener("toggle", () => { made.open ? this.closed.delete(group) : this.closed.add(group); });
    return made;
  },

  card(name) {
    const last = el("span"), canvas = el("canvas");
    const made = el("div", { class: "card", tabindex: 0, role: "button", "data-metric": name,
      title: shownRuns().map((run) => run.curves.meanings?.[name]).find(Boolean) ?? "",
      "aria-label": `${name}: enlarge` }, el("h2", {}, el("div", {}, breakable(name)), last), canvas);
    Object.assign(made, { metric: name, canvas, last });
    made.addEventListener("click", () => this.enlarge(name));
    made.addEventListener("keydown", (event) => { if (event.key === "Enter") this.enlarge(name); });
    this.follow(canvas);
    this.cards.push(made);
    this.watch.observe(made);
    return made;
  },

  follow(canvas) {
    canvas.addEventListener("pointermove", (event) => {
      const found = readChart(canvas, event.clientX);
      if (!found?.length) return;
      const rows = found.map((one) => [one.color, `${one.name}, ${this.axis === "step" ? "step" : "after"} ` +
        `${this.axis === "step" ? fmtWhole(one.x) : fmtSeconds(one.x * 3600)}`,
      this.smooth ? `${fmt(one.value)}  (${fmt(one.smooth)})` : fmt(one.value)]);
      Tip.show(event.clientX, event.clientY, tipTable(rows));
    });
    canvas.addEventListener("pointerleave", () => Tip.hide());
  },

  paint(card) {
    const series = this.series(card.metric);
    const ends = series.length > 3 ? [] : series.map((one) => el("b", { style: { color: one.color } },
      fmt(one.y.findLast((value) => value !== null))));
    card.last.replaceChildren(...ends);
    drawChart(card.canvas, series, this.options());
  },

  options() {
    const byStep = this.axis === "step";
    return { log: this.log, smooth: this.smooth, whole: byStep,
      fmtX: (x) => byStep ? fmtTick(x, 1) : x < 0.1 ? `${Number((x * 60).toPrecision(3))}m`
        : `${Number(x.toPrecision(3))}h` };
  },

  series(name) {
    return shownRuns().filter((run) => name in run.curves.columns).map((run) => {
      const [at, y] = run.curves.columns[name], all = this.axis === "step" ? run.curves.steps : hoursOf(run);
      return { name: run.name, color: run.color, y, x: at ? at.map((i) => all[i]) : all };
    });
  },

  redraw() { for (const card of this.cards) if (card.visible) this.paint(card); },

  enlarge(name) {
    const dialog = document.getElementById("dialog"), canvas = el("canvas");
    const close = el("button", { type: "button", onclick: () => dialog.close() }, "Close (Esc)");
    const save = el("button", { type: "button", onclick: () => savePicture(canvas, name, this.series(name)) }, "Save picture");
    dialog.replaceChildren(el("div", { class: "top" }, el("h2", {}, name), save, close), canvas,
      el("div", { class: "legend" }, this.series(name).map((one) =>
        el("span", {}, el("i", { style: { "--c": one.color } }), `${one.name}  ${fmt(one.y.at(-1))}`))));
    dialog.showModal();
    drawChart(canvas, this.series(name), this.options());
    this.follow(canvas);
    dialog.onclose = () => Tip.hide();
  },
};

// Hours after the first row by the clock, where rows have the time; else those that the steps took together.
function hoursOf(run) {
  const stamps = run.curves.columns["perf/timestamp_s"];
  if (stamps && !stamps[0] && !stamps[1].includes(null)) return stamps[1].map((at) => (at - stamps[1][0]) / 3600);
  const column = run.curves.columns["timing/step_s"], hours = new Array(run.curves.steps.length).fill(0);
  if (!column) return run.curves.steps;
  column[1].forEach((seconds, i) => { hours[column[0] ? column[0][i] : i] = (seconds ?? 0) / 3600; });
  let sum = 0;
  return hours.map((one) => (sum += one));
}
