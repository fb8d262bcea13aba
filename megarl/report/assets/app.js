// Tabs, runs, keys, light and dark, and looking for what is new.

const KEYS = [
  ["1 to 5", "parts of the report"], ["/", "search"], ["t", "light or dark"], ["j k ↑ ↓", "next, previous rollout"],
  ["← →", "other steps of the timeline"], ["Enter", "enlarge a curve"], ["Esc", "close; leave a field"],
  ["?", "these keys"],
];

const App = {
  tab: null,

  tabs() { return [Curves, Rollouts, Timeline, ...(Memory.there() ? [Memory] : []), Settings]; },

  async start() {
    document.getElementById("theme").addEventListener("click", () => this.theme(true));
    document.getElementById("help").addEventListener("click", () => this.help());
    addEventListener("keydown", (event) => this.key(event));
    addEventListener("resize", later(120, () => this.select(this.tab)));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.theme(false));
    this.theme(false);
    for (let tries = LIVE ? 5 : 1; ; tries--) {
      try {
        if (LIVE) await Blocks.look();
        await loadRuns();
        break;
      } catch (error) {
        if (tries === 1) return this.fail(error);
        await new Promise((done) => setTimeout(done, 700));
      }
    }
    this.showRuns();
    const wanted = decodeURIComponent(location.hash.slice(1));
    await this.select(this.tabs().find((tab) => tab.title.toLowerCase() === wanted) ?? Curves);
    if (LIVE) this.follow();
    document.documentElement.dataset.ready = "true";
  },

  fail(error) {
    document.getElementById("main").replaceChildren(el("p", { class: "empty" },
      `This cannot be read: ${error.message}`));
  },

  // The reader's choice, or else the system's.
  theme(other) {
    const root = document.documentElement, stored = this.store("theme");
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    let now = stored ?? system;
    if (other) { now = root.dataset.theme === "dark" ? "light" : "dark"; this.store("theme", now); }
    root.dataset.theme = now;
    if (this.tab) this.select(this.tab);
  },

  store(name, value) {
    try {
      if (value !== undefined) localStorage.setItem(`megarl-${name}`, value);
      return localStorage.getItem(`megarl-${name}`);
    } catch { return null; } // a file's page may have no storage
  },

  showRuns() {
    document.title = `MegaRL: ${report.runs.map((run) => run.name).join(", ")}`;
    const chips = report.runs.map((run) => el("button", { type: "button", class: "run",
      "aria-pressed": String(run.shown),
      title: run.folder, style: { "--c": run.color }, onclick: (event) => {
        run.shown = !run.shown;
        event.currentTarget.setAttribute("aria-pressed", String(run.shown));
        this.select(this.tab);
      } }, el("i"), run.name));
    const notes = report.runs.filter((run) => run.curves.damaged).map((run) =>
      el("span", { class: "note" },
        `${run.name}: ${run.curves.damaged} damaged line${run.curves.damaged > 1 ? "s" : ""} of metrics left out`));
    const runs = document.getElementById("runs");
    runs.replaceChildren(...chips, ...notes);
  },

  async select(tab) {
    this.tab = tab;
    Tip.hide();
    const tabs = this.tabs();
    document.getElementById("tabs").replaceChildren(...tabs.map((one, i) => el("button", { type: "button", role: "tab",
      "aria-selected": String(one === tab), title: `${one.title} (${i + 1})`, onclick: () => this.select(one) },
        one.title)));
    try { history.replaceState(null, "", `#${tab.title.toLowerCase()}`); } catch { /* a page without an address */ }
    try { await tab.show(document.getElementById("main")); } catch (error) { this.fail(error); }
  },

  help() {
    const dialog = document.getElementById("dialog");
    dialog.replaceChildren(el("div", { class: "top" }, el("h2", {}, "Keys"),
      el("button", { type: "button", onclick: () => dialog.close() }, "Close (Esc)")),
    el("table", { class: "plain" }, KEYS.map(([key, what]) =>
      el("tr", {}, el("td", {}, el("code", {}, key)), el("td", {}, what)))));
    dialog.showModal();
  },

  key(event) {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox";
    if (event.key === "Escape" && typing) { event.target.blur(); return; }
    if (typing || event.ctrlKey || event.metaKey || event.altKey || document.getElementById("dialog").open) return;
    const tab = this.tabs()[Number(event.key) - 1];
    if (tab) this.select(tab);
    else if (event.key === "/") { event.preventDefault(); document.getElementById("search")?.focus(); }
    else if (event.key === "t") this.theme(true);
    else if (event.key === "?") this.help();
    else if (this.tab === Timeline) Timeline.key(event);
    else if (this.tab === Rollouts && ["j", "k", "ArrowDown", "ArrowUp"].includes(event.key)
      && event.target !== Rollouts.rows)
      Rollouts.key(event);
  },

  // Every few seconds what is new, without losing the reader's place.
  async follow() {
    const state = document.getElementById("state"), pending = new Set();
    for (;;) {
      await new Promise((done) => setTimeout(done, 2500));
      if (document.hidden) continue;
      try {
        for (const name of await Blocks.look()) pending.add(name);
        if (pending.size) await this.renew([...pending]);
        pending.clear();
        state.className = "";
        state.textContent = `step ${report.runs.map((run) => run.curves.steps.at(-1) ?? "–").join(", ")}`;
      } catch {
        state.className = "off";
        state.textContent = "the server does not answer; trying again";
      }
    }
  },

  async renew(changed) {
    const is = (kind) => changed.some((name) => name.startsWith(kind));
    await loadRuns();
    this.showRuns();
    if (is("rollouts-") || is("texts-")) {
      if (Rollouts.all) await Rollouts.refresh(); else if (this.tab === Rollouts) await this.select(Rollouts);
    }
    if (this.tab === Curves && is("curves-")) {
      const main = document.getElementById("main"), top = main.scrollTop;
      const known = Curves.cards.length, names = new Set(Curves.names());
      if (Curves.cards.some((card) => !names.has(card.metric))
        || new Set(Curves.cards.map((c) => c.metric)).size !== names.size || !known)
        Curves.draw();
      else Curves.redraw();
      main.scrollTop = top;
    }
    if (this.tab === Timeline && is("timeline-")) Timeline.refresh();
    if (this.tab === Memory && is("curves-")) Memory.show(document.getElementById("main"));
  },
};

App.start();
