// Phases of every rank on one time axis.

const phaseColor = (name) => PHASE_COLORS[name] ?? PHASE_COLORS.other;

const Timeline = {
  title: "Timeline", run: 0, end: Infinity, count: 3, view: null,

  runs() { return report.runs.filter((run) => run.timeline.steps.length); },

  show(main) {
    const runs = this.runs();
    if (!runs.length) {
      main.replaceChildren(el("p", { class: "empty" },
        "No timeline is written: runs whose trainer.logger has jsonl do."));
      return;
    }
    const run = runs.find((one) => one.place === this.run) ?? runs[0], steps = run.timeline.steps;
    const last = Math.min(steps.length - 1, this.end), first = Math.max(0, last - this.count + 1);
    const shown = steps.slice(first, last + 1);
    const pick = el("select", { id: "timeline-run" }, runs.map((one) => option(one.place, one.name)));
    pick.value = run.place;
    pick.addEventListener("change", () => { this.run = Number(pick.value); this.end = Infinity; this.show(main); });
    const at = el("input", { type: "range", min: 0, max: steps.length - 1, value: last, id: "timeline-at" });
    at.addEventListener("input", () => { this.go(Number(at.value), steps.length); });
    const many = el("select", { id: "timeline-many" },
      [1, 3, 10, 30].map((n) => option(n, n === 1 ? "1 step" : `${n} steps`)));
    many.value = this.count;
    many.addEventListener("change", () => { this.count = Number(many.value); this.show(main); });
    const label = first === last ? `step ${shown[0].step}` : `steps ${shown[0].step} to ${shown.at(-1).step}`;
    this.canvas = el("canvas", { id: "timeline", tabindex: 0, "aria-label": "Phases of every rank" });
    const ranks = Math.max(...shown.map((step) => step.ranks.length));
    const [verdict, table] = this.table(shown, ranks);
    main.replaceChildren(
      el("div", { class: "bar" }, runs.length > 1 ? pick : "", many, field("up to", at), el("b", {}, label),
        el("span", { class: "count" }, "← → other steps · wheel zooms · drag moves · double click: all")),
      el("div", { class: "panel" }, verdict, this.canvas, this.legend(shown)), table);
    this.layout(shown, ranks);
    this.draw();
    this.listen();
  },

  go(end, length) {
    this.end = end >= length - 1 ? Infinity : Math.max(0, end);
    const focused = document.activeElement?.id;
    this.show(document.getElementById("main"));
    if (focused) document.getElementById(focused)?.focus();
  },

  key(event) {
    const run = this.runs().find((one) => one.place === this.run) ?? this.runs()[0];
    if (!run || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    const length = run.timeline.steps.length;
    this.go(Math.min(length - 1, this.end) + (event.key === "ArrowLeft" ? -1 : 1), length);
  },

  // Bars: {rank, phase, from, to, step, wait}, in seconds after the first step that is shown began.
  layout(shown, ranks) {
    const zero = shown[0].began;
    this.bars = shown.flatMap((step) => step.ranks.flatMap((spans, rank) => {
      const bars = [];
      for (let i = 0; i < spans.length; i += 3) {
        const from = step.began - zero + spans[i + 1], phase = step.phases[spans[i]];
        bars.push({ rank, phase, from, to: from + spans[i + 2], step: step.step, wait: phase === "wait" });
      }
      return bars;
    }));
    this.bars.sort((a, b) => a.wait - b.wait);
    this.marks = shown.map((step) => ({ at: step.began - zero, step: step.step }));
    const ends = this.bars.reduce(([a, b], bar) => [Math.min(a, bar.from), Math.max(b, bar.to)], [Infinity, 0]);
    this.whole = this.view = [Math.min(0, ends[0]), ends[1]];
    this.ranks = ranks;
    this.height = Math.max(3, Math.min(30, 560 / ranks));
    this.canvas.style.height = `${this.height * ranks + 46}px`;
  },

  draw() {
    const { width, height } = this.canvas.getBoundingClientRect();
    const context = surface(this.canvas, width, height), left = 62, top = 20, [t0, t1] = this.view;
    const px = (t) => left + (t - t0) / (t1 - t0) * (width - left - 6);
    context.font = FONT;
    context.textBaseline = "middle";
    context.fillStyle = cssColor("--soft");
    context.textAlign = "right";
    const every = Math.ceil(13 / this.height);
    for (let rank = 0; rank < this.ranks; rank += every)
      context.fillText(`rank ${rank}`, left - 8, top + (rank + 0.5) * this.height);
    context.textAlign = "center";
    for (const t of niceTicks(t0, t1, width / 110)) {
      const x = Math.round(px(t)) + 0.5;
      context.strokeStyle = cssColor("--grid");
      context.beginPath(); context.moveTo(x, top); context.lineTo(x, height - 22); context.stroke();
      context.fillText(`${Number(t.toFixed(4))} s`, Math.min(x, width - 20), height - 10);
    }
    context.save();
    context.beginPath(); context.rect(left, 0, width - left, height); context.clip();
    const hatch = this.hatch(context), gap = this.height < 6 ? 0 : 1;
    for (const bar of this.bars) {
      if (bar.to < t0 || bar.from > t1) continue;
      const x = px(bar.from), w = Math.max(0.6, px(bar.to) - x), y = top + bar.rank * this.height;
      context.fillStyle = bar.wait ? hatch : phaseColor(bar.phase);
      context.fillRect(x, y + gap, w, this.height - 2 * gap);
    }
    context.textAlign = "left";
    for (const mark of this.marks) {
      const x = Math.round(px(mark.at)) + 0.5;
      context.strokeStyle = cssColor("--ink");
      context.beginPath(); context.moveTo(x, 4); context.lineTo(x, height - 22); context.stroke();
      context.fillStyle = cssColor("--ink");
      context.fillText(`step ${mark.step}`, x + 4, 9);
    }
    context.restore();
  },

  hatch(context) {
    const tile = el("canvas", { width: 6, height: 6 }), t = tile.getContext("2d");
    t.fillStyle = cssColor("--card"); t.globalAlpha = 0.72; t.fillRect(0, 0, 6, 6);
    t.globalAlpha = 0.8; t.strokeStyle = cssColor("--soft"); t.lineWidth = 1.2;
    for (const d of [-6, 0, 6]) { t.beginPath(); t.moveTo(d, 6); t.lineTo(d + 6, 0); t.stroke(); }
    return context.createPattern(tile, "repeat");
  },

  at(event) {
    const { left, top, width } = this.canvas.getBoundingClientRect(), [t0, t1] = this.view;
    return { t: t0 + (event.clientX - left - 62) / (width - 68) * (t1 - t0),
      rank: Math.floor((event.clientY - top - 20) / this.height) };
  },

  listen() {
    const canvas = this.canvas;
    let drag = null;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const { t } = this.at(event), zoom = Math.exp(event.deltaY * 0.0015), [t0, t1] = this.view;
      this.set(t + (t0 - t) * zoom, t + (t1 - t) * zoom);
    }, { passive: false });
    canvas.addEventListener("pointerdown",
      (event) => { drag = this.at(event).t; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", () => { drag = null; });
    canvas.addEventListener("dblclick", () => this.set(...this.whole));
    canvas.addEventListener("pointerleave", () => Tip.hide());
    canvas.addEventListener("pointermove", (event) => {
      const { t, rank } = this.at(event);
      if (drag !== null) { const by = drag - t; this.set(this.view[0] + by, this.view[1] + by); return; }
      const here = this.bars.filter((bar) => bar.rank === rank && bar.from <= t && bar.to >= t);
      if (!here.length) return Tip.hide();
      Tip.show(event.clientX, event.clientY, el("b", {}, `rank ${rank}, step ${here[0].step}`),
        tipTable(here.map((bar) =>
        [bar.wait ? "" : phaseColor(bar.phase), bar.wait ? "waits for other ranks" : bar.phase,
          fmtSeconds(bar.to - bar.from)])));
    });
  },

  set(t0, t1) {
    const [a, b] = this.whole, room = Math.min(b - a, Math.max(1e-3, t1 - t0));
    const from = Math.max(a, Math.min(b - room, t0));
    this.view = [from, from + room];
    this.draw();
  },

  legend(shown) {
    const used = shown[0].phases.filter((phase, i) => phase !== "wait" && shown.some((step) =>
      step.ranks.some((spans) => spans.some((value, k) => k % 3 === 0 && value === i))));
    return el("div", { class: "legend" },
      used.map((phase) => el("span", {}, el("i", { style: { "--c": phaseColor(phase) } }), phase)),
      el("span", {}, el("i", { class: "waits" }), "waits until all ranks have come this far"));
  },

  // Seconds of each rank: a rank that waits less than the others is the one that they wait for.
  table(shown, ranks) {
    const phases = shown[0].phases, used = new Set(), sums = [];
    for (let rank = 0; rank < ranks; rank++) {
      const sum = new Array(phases.length).fill(0);
      for (const step of shown) {
        const spans = step.ranks[rank] ?? [];
        for (let i = 0; i < spans.length; i += 3) { sum[spans[i]] += spans[i + 2]; used.add(spans[i]); }
      }
      sums.push(sum);
    }
    const wait = phases.indexOf("wait"), waits = sums.map((sum) => sum[wait] ?? 0);
    const all = [...waits].sort((a, b) => a - b);
    const middle = all[all.length >> 1], least = waits.indexOf(all[0]);
    const span = this.spanOf(shown), lag = middle - all[0], late = ranks > 1 && lag > 0.02 * span ? least : -1;
    const columns = phases.map((_, i) => i).filter((i) => used.has(i));
    const order = [...sums.keys()].sort((a, b) => waits[a] - waits[b]).slice(0, 256);
    if (ranks <= 32) order.sort((a, b) => a - b);
    const verdict = ranks < 2 ? "One rank: it waits for nobody." : late < 0
      ? "No rank keeps the others waiting for more than 2% of the time."
      : `Rank ${late} is the one that others wait for: it waited ${fmtSeconds(lag)} less than they did, ` +
        `of ${fmtSeconds(span)}.`;
    return [el("p", { id: "straggler", class: late < 0 ? "" : "note" }, verdict), el("div", { class: "panel scroll" },
      el("table", { class: "plain", id: "rank-table" },
        el("tr", {}, el("th", {}, "rank"), columns.map((i) => el("th", { class: "num" }, phases[i]))),
        order.map((rank) => el("tr", { class: rank === late ? "straggler" : "", "data-rank": rank },
          el("td", {}, `rank ${rank}`),
          columns.map((i) => el("td", { class: "num" }, fmtSeconds(sums[rank][i])))))))];
  },

  spanOf(shown) {
    let low = Infinity, high = 0;
    for (const step of shown) for (const spans of step.ranks) for (let i = 0; i < spans.length; i += 3) {
      low = Math.min(low, step.began + spans[i + 1]); high = Math.max(high, step.began + spans[i + 1] + spans[i + 2]);
    }
    return Math.max(1e-9, high - low);
  },

  refresh() { if (this.end === Infinity) this.show(document.getElementById("main")); },
};
