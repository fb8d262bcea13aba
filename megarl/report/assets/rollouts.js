// The rollouts of all runs: a table of rows that are drawn as they come into view, filters, order; one that is opened.

const FINISH = ["stop", "length", ""];
const SORTS = { step: "step", reward: "reward", length: "tokens", source: "source", text: "response" };
const ROW = 28;

const Rollouts = {
  title: "Rollouts",
  all: null, texts: null, order: new Int32Array(0), at: -1, sort: "step", down: true,
  wanted: { text: "", run: "", source: "", finish: "", prompt: -1, group: "",
    step: ["", ""], reward: ["", ""], length: ["", ""] },

  // The index of every run, as typed arrays; -1 and NaN stand for what a record does not say.
  async load() {
    const found = await Promise.all(report.runs.map((run) => Blocks.get(`rollouts-${run.place}`)));
    const n = found.reduce((sum, one) => sum + one.columns.step.length, 0), sources = new Map(), prompts = new Map();
    const all = { n, prompts: [], sources: [], damaged: found.reduce((sum, one) => sum + one.damaged, 0) };
    for (const name of ["run", "step", "length", "finish", "source", "prompt", "group", "sample", "turns", "chunk",
      "row"])
      all[name] = new Int32Array(n);
    all.reward = new Float64Array(n);
    const place = (table, list, key, value) => {
      if (!table.has(key)) { table.set(key, list.length); list.push(value); }
      return table.get(key);
    };
    let i = 0;
    found.forEach((one, run) => {
      const c = one.columns;
      const source = one.sources.map((name) => place(sources, all.sources, name, name));
      const prompt = one.prompts.map(([index, text]) => place(prompts, all.prompts, text, { index, text }));
      let chunk = 0, row = 0;
      for (let j = 0; j < c.step.length; j++, i++, row++) {
        while (row >= one.chunks[chunk]) { chunk++; row = 0; }
        for (const name of ["step", "length", "finish", "group", "sample", "turns"]) all[name][i] = c[name][j];
        all.reward[i] = c.reward[j] ?? NaN;
        all.run[i] = run; all.chunk[i] = chunk; all.row[i] = row;
        all.source[i] = source[c.source[j]]; all.prompt[i] = prompt[c.prompt[j]];
      }
    });
    this.chunks = found.map((one) => one.chunks);
    this.all = all;
    this.texts = await this.allTexts();
  },

  async allTexts() {
    const texts = [];
    for (let run = 0; run < this.chunks.length; run++) {
      const parts = await Promise.all(this.chunks[run].map((_, chunk) => Blocks.get(`texts-${run}-${chunk}`)));
      for (const part of parts) for (const text of part) texts.push(text);
    }
    return texts;
  },

  async show(main) {
    if (!this.all) {
      main.replaceChildren(el("p", { class: "empty" }, "Reading the rollouts …"));
      await this.load();
      if (App.tab !== this) return;
    }
    if (!this.all.n) {
      main.replaceChildren(el("p", { class: "empty" }, "No rollouts are written: see trainer.log_rollouts."));
      return;
    }
    this.rows = el("div", { class: "rows", tabindex: 0, role: "listbox", id: "rows", "aria-label": "Rollouts" });
    this.rows.addEventListener("scroll", () => this.paint());
    this.rows.addEventListener("keydown", (event) => this.key(event));
    this.detail = el("div", { class: "pane detail", id: "detail", tabindex: -1 });
    this.count = el("span", { class: "count", id: "count" });
    this.heads = el("div", { class: "heads" });
    main.replaceChildren(el("div", { class: "fill" }, this.filters(),
      el("div", { class: "split" }, el("div", { class: "pane scroll" }, this.heads, this.rows), this.detail)));
    new ResizeObserver(() => this.paint()).observe(this.rows);
    this.apply();
    if (this.at < 0 && this.order.length) this.open(0, false); else this.detailOf(this.opened ?? this.order[0]);
  },

  filters() {
    const w = this.wanted, text = el("input", { type: "search", id: "search", value: w.text,
      placeholder: "Search prompts and responses  (/)", "aria-label": "Search prompts and responses" });
    text.addEventListener("input", later(120, () => { w.text = text.value; this.apply(true); }));
    const range = (name, label) => el("label", {}, label, ...[0, 1].map((end) => {
      const input = el("input", { type: "number", step: "any", value: w[name][end],
        id: `${name}-${end ? "to" : "from"}`,
        placeholder: end ? "to" : "from", "aria-label": `${label} ${end ? "to" : "from"}` });
      input.addEventListener("input", later(120, () => { w[name][end] = input.value; this.apply(true); }));
      return input;
    }));
    const pick = (name, label, options) => {
      const input = el("select", { id: name, "aria-label": label }, option("", label), options);
      input.value = w[name];
      input.addEventListener("change", () => { w[name] = input.value; this.apply(true); });
      return input;
    };
    const picks = [
      report.runs.length > 1 && pick("run", "every run", report.runs.map((run, i) => option(i, run.name))),
      this.all.sources.length > 1 && pick("source", "every source", this.all.sources.map((name, i) => option(i, name))),
      pick("finish", "every ending", [option(0, "stopped"), option(1, "cut off")])];
    this.only = el("button", { type: "button", hidden: true, id: "only", onclick: () => {
      w.prompt = -1; w.group = ""; this.apply(true); this.mark(); } });
    const bar = el("div", { class: "bar" }, text, range("reward", "reward"), range("step", "step"),
      range("length", "tokens"), ...picks.filter(Boolean), this.only, this.count);
    return bar;
  },

  // Rows that pass every filter, in order.
  select() {
    const a = this.all, w = this.wanted;
    const bounds = (name) => w[name].map((v, end) => v !== "" ? +v : end ? Infinity : -Infinity);
    const [s0, s1] = bounds("step"), [r0, r1] = bounds("reward"), [l0, l1] = bounds("length");
    const anyReward = w.reward[0] === "" && w.reward[1] === "", shown = report.runs.map((run) => run.shown);
    const pattern = w.text && new RegExp(w.text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "i");
    const inPrompt = pattern && a.prompts.map((prompt) => pattern.test(prompt.text));
    const kept = new Int32Array(a.n);
    let n = 0;
    for (let i = 0; i < a.n; i++) {
      if (!shown[a.run[i]] || a.step[i] < s0 || a.step[i] > s1 || a.length[i] < l0 || a.length[i] > l1) continue;
      if (!anyReward && !(a.reward[i] >= r0 && a.reward[i] <= r1)) continue;
      if (w.run !== "" && a.run[i] !== +w.run) continue;
      if (w.source !== "" && a.source[i] !== +w.source) continue;
      if (w.finish !== "" && a.finish[i] !== +w.finish) continue;
      if (w.prompt >= 0 && a.prompt[i] !== w.prompt) continue;
      if (w.group && `${a.run[i]} ${a.step[i]} ${a.group[i]}` !== w.group) continue;
      if (pattern && !inPrompt[a.prompt[i]] && !pattern.test(this.texts[i])) continue;
      kept[n++] = i;
    }
    return this.sorted(kept.subarray(0, n));
  },

  sorted(places) {
    const a = this.all, sign = this.down ? -1 : 1, column = a[this.sort];
    const tie = (i, j) => a.step[j] - a.step[i] || i - j;
    if (this.sort === "text")
      return places.sort((i, j) => sign * (this.texts[i] < this.texts[j] ? -1 : this.texts[i] > this.texts[j] ? 1 : 0)
        || i - j);
    if (this.sort === "source")
      return places.sort((i, j) => sign * a.sources[a.source[i]].localeCompare(a.sources[a.source[j]]) || tie(i, j));
    // without a value: last, whatever the direction
    const unknown = (x) => Number.isNaN(x) || (this.sort === "length" && x < 0);
    const value = (i) => unknown(column[i]) ? sign * Infinity : column[i];
    return places.sort((i, j) => {
      const x = value(i), y = value(j);
      return x === y ? tie(i, j) : x < y ? -sign : sign;
    });
  },

  apply(fromTop = false) {
    const opened = this.opened;
    this.order = this.select();
    this.at = this.order.indexOf(opened ?? -1);
    this.count.textContent = `${fmtWhole(this.order.length)} of ${fmtWhole(this.all.n)} rollouts` +
      (this.all.damaged ? `, ${fmtWhole(this.all.damaged)} damaged lines left out` : "");
    const several = this.all.sources.length > 1;
    this.rows.parentElement.style.setProperty("--columns",
      `52px 58px 54px ${several ? "96px " : ""}minmax(0, 2fr) minmax(0, 3fr)`);
    const heads = Object.entries(SORTS).filter(([key]) => several || key !== "source");
    this.heads.replaceChildren(...heads.map(([key, name]) =>
      el("button", { type: "button", "data-sort": key, onclick: () => this.sortBy(key), title: `Sort by ${name}`,
        "aria-sort": this.sort === key ? (this.down ? "descending" : "ascending") : null },
      name + (this.sort === key ? (this.down ? " ↓" : " ↑") : ""))));
    this.heads.lastChild.before(el("span", {}, "prompt"));
    const w = this.wanted;
    this.only.hidden = w.prompt < 0 && !w.group;
    this.only.textContent = w.group ? "one group ✕" : "one prompt ✕";
    if (fromTop) this.rows.scrollTop = 0;
    this.paint();
  },

  sortBy(key) {
    this.down = this.sort === key ? !this.down : key !== "text" && key !== "source";
    this.sort = key;
    this.apply(true);
  },

  // The rows in view, and a few beside them.
  paint() {
    const top = this.rows.scrollTop, first = Math.max(0, Math.floor(top / ROW) - 8);
    const last = Math.min(this.order.length, Math.ceil((top + this.rows.clientHeight) / ROW) + 8);
    const made = [el("div", { style: { height: `${this.order.length * ROW}px` } })];
    for (let place = first; place < last; place++) made.push(this.row(place));
    this.rows.replaceChildren(...made);
    if (!this.order.length) this.rows.append(el("p", { class: "empty" }, "No rollout passes these filters."));
  },

  row(place) {
    const a = this.all, i = this.order[place], several = report.runs.length > 1;
    const dot = several ? el("i", { style: { "--c": report.runs[a.run[i]].color },
      title: report.runs[a.run[i]].name }) : "";
    return el("div", { class: "row", role: "option", "aria-selected": String(i === this.opened), "data-place": place,
      style: { top: `${place * ROW}px` },
        onclick: () => { this.open(place); this.rows.focus({ preventScroll: true }); } },
    el("span", {}, dot, String(a.step[i])),
    el("span", {}, fmt(a.reward[i])), el("span", {}, a.length[i] < 0 ? "–" : String(a.length[i])),
    a.sources.length > 1 ? el("span", {}, a.sources[a.source[i]]) : null,
    el("span", {}, el("small", {}, oneLine(asked(a.prompts[a.prompt[i]].text), 48, true))),
    el("span", {}, oneLine(this.texts[i], 160)));
  },

  key(event) {
    const page = Math.max(1, Math.floor(this.rows.clientHeight / ROW) - 1);
    const moves = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: page, PageUp: -page, Home: -1e9, End: 1e9 };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.open(Math.max(0, Math.min(this.order.length - 1, this.at + moves[event.key])));
  },

  open(place, scroll = true) {
    if (!this.order.length) return;
    this.at = place;
    this.opened = this.order[place];
    if (scroll) {
      const top = place * ROW, { scrollTop, clientHeight } = this.rows;
      if (top < scrollTop) this.rows.scrollTop = top;
      else if (top + ROW > scrollTop + clientHeight) this.rows.scrollTop = top + ROW - clientHeight;
    }
    this.mark();
    this.detailOf(this.opened);
  },

  mark() { this.paint(); },

  // Only this prompt, or only this group, oldest first.
  narrow(prompt, group) {
    Object.assign(this.wanted, { prompt, group });
    if (!group) { this.sort = "step"; this.down = false; } else { this.sort = "reward"; this.down = true; }
    this.apply(true);
  },

  async detailOf(i) {
    if (i === undefined || i < 0) return;
    const a = this.all, run = report.runs[a.run[i]];
    const record = (await Blocks.get(`details-${a.run[i]}-${a.chunk[i]}`))[a.row[i]];
    if (this.opened !== undefined && i !== this.opened) return; // another one was opened meanwhile
    const prompt = a.prompts[a.prompt[i]];
    const facts = [["run", run.name], ["step", a.step[i]], ["reward", fmt(a.reward[i])]];
    for (const [name, value] of Object.entries(record.parts ?? {}))
      facts.push([name.replace(/^part\//, ""), fmt(value)]);
    if (prompt.index >= 0) facts.push(["prompt", prompt.index]);
    if (a.sample[i] >= 0) facts.push(["sample", a.sample[i]]);
    if (a.sources[a.source[i]]) facts.push(["source", a.sources[a.source[i]]]);
    if (a.length[i] >= 0) facts.push(["tokens", a.length[i]]);
    if (FINISH[a.finish[i]]) facts.push(["ended by", FINISH[a.finish[i]]]);
    const group = `${a.run[i]} ${a.step[i]} ${a.group[i]}`;
    this.detail.replaceChildren(
      el("div", { class: "facts" },
        facts.map(([name, value]) => el("span", {}, `${name} `, el("b", {}, String(value))))),
      record.error ? el("p", { class: "facts" }, el("span", { class: "bad" }, record.error)) : "",
      el("div", { class: "tools" },
        a.group[i] >= 0 ? el("button", { type: "button", id: "group",
          title: "All responses to this drawing of the prompt",
          onclick: () => this.narrow(-1, group) }, "This group") : "",
        el("button", { type: "button", id: "across", title: "All responses to this prompt, oldest first",
          onclick: () => this.narrow(a.prompt[i], "") }, "This prompt across steps"),
        Tokens.tools(record, () => this.detailOf(i))),
      el("h3", {}, "Prompt"), el("div", { class: "text" }, prompt.text),
      record.answer ? el("h3", {}, "Answer of the data") : "",
      record.answer ? el("div", { class: "text" }, record.answer) : "",
      el("h3", {}, "Response"), Tokens.response(record, this.texts[i]));
  },

  async refresh() {
    const before = this.all && this.opened >= 0 ? this.identity(this.opened) : null;
    const scroll = this.rows?.scrollTop;
    await this.load();
    this.opened = undefined;
    if (before) for (let i = 0; i < this.all.n; i++) if (this.identity(i) === before) { this.opened = i; break; }
    if (App.tab !== this) return;
    if (!this.rows?.isConnected) return this.show(document.getElementById("main"));
    this.apply();
    this.rows.scrollTop = scroll;
  },

  identity(i) {
    const a = this.all;
    return [a.run[i], a.step[i], a.group[i], a.sample[i], a.prompts[a.prompt[i]].text, this.texts[i]].join("\u0000");
  },
};

// The end of a prompt, without what a chat template puts there.
function asked(text) {
  for (let left = text.slice(-600).trimEnd(); ;) {
    const less = left.replace(/<[^<>\s]{1,40}>$/, "").replace(/\sassistant$/, "").trimEnd();
    if (less === left) return left;
    left = less;
  }
}

function oneLine(text, most, end = false) {
  const flat = (end ? text.slice(-4 * most) : text.slice(0, 4 * most)).replace(/\s+/g, " ");
  if (flat.length <= most) return flat;
  return end ? `…${flat.slice(-most)}` : `${flat.slice(0, most)}…`;
}
