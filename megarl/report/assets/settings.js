// Configuration: what differs from the defaults, and between runs; the starts of each run.

const Settings = {
  title: "Configuration", search: "", only: "changed",

  show(main) {
    const search = el("input", { type: "search", id: "search", placeholder: "Search keys  (/)", value: this.search,
      "aria-label": "Search keys" });
    search.addEventListener("input", () => { this.search = search.value; this.draw(); });
    const only = el("select", { id: "settings-only" }, option("changed", "not the default"),
      report.runs.length > 1 ? option("different", "different between runs") : [], option("all", "every key"));
    only.value = this.only;
    only.addEventListener("change", () => { this.only = only.value; this.draw(); });
    this.count = el("span", { class: "count", id: "count" });
    this.body = el("div", { class: "panel" });
    main.replaceChildren(el("div", { class: "bar" }, search, only, this.count), this.body,
      ...shownRuns().filter((run) => run.starts.total || run.starts.parent).map((run) => this.starts(run)));
    this.draw();
  },

  starts(run) {
    const { total, gpu_hours: hours, parent, rows } = run.starts;
    const about = [`${total} start${total === 1 ? "" : "s"}`, hours ? `${hours.toFixed(1)} GPU-hours` : "",
      parent ? `branched from ${parent}` : ""].filter(Boolean).join(", ");
    const heads = ["start", "began", "lasted", "ended", "user", "hosts", "ranks", "megarl", "from"];
    return el("div", { class: "panel", "data-starts": run.name }, el("h2", {}, `${run.name}: ${about}`),
      el("table", { class: "plain stacked" }, el("tr", {}, heads.map((head) => el("th", {}, head))),
        rows.toReversed().map(([number, began, seconds, ended, user, hosts, ranks, code, checkpoint, command]) => {
          const texts = [number, began ? new Date(began * 1000).toLocaleString() : "–", fmtSeconds(seconds), ended, user,
            hosts, ranks, code, checkpoint.split("/").at(-1) || "the beginning"];
          return el("tr", { title: command }, texts.map((text, i) =>
            el("td", { "data-label": heads[i] }, breakable(String(text)))));
        })));
  },

  draw() {
    const { rows, unreadable } = report.settings, runs = shownRuns(),
      words = this.search.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = rows.filter(([key, description, , values, differs]) => {
      const mine = runs.map((run) => values[run.place]);
      if (this.only === "changed" && !runs.some((run) => differs[run.place])) return false;
      if (this.only === "different" && new Set(mine).size < 2) return false;
      const text = `${key} ${description} ${mine.join(" ")}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    this.count.textContent = `${kept.length} of ${rows.length} keys`;
    const notes = runs.filter((run) => unreadable[run.place]).map((run) =>
      el("p", {}, el("span", { class: "note" }, `${run.name}: ${unreadable[run.place]}`)));
    const legend = runs.length > 1 ? el("div", { class: "legend" }, "Shaded: the runs differ.") : "";
    this.body.replaceChildren(...notes, legend, el("table", { class: "plain stacked", id: "settings" },
      el("tr", {}, el("th", {}, "key"), el("th", {}, "default"), runs.map((run) => el("th", {}, run.name))),
      kept.map(([key, description, value, values, differs]) => el("tr", { title: description,
        class: new Set(runs.map((run) => values[run.place])).size > 1 ? "differs" : "" },
        el("td", {}, el("code", {}, breakable(key))),
        el("td", { "data-label": "default" }, el("code", {}, breakable(value ?? "–"))),
        runs.map((run) => el("td", { class: differs[run.place] ? "changed" : "", "data-label": run.name },
          el("code", {}, breakable(values[run.place] ?? "–"))))))));
  },
};
