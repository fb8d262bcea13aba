"use strict";
// Blocks of the report: from this page, or from the server that it comes from.

const LIVE = document.documentElement.dataset.live === "true";
const RUN_COLORS = ["#4a78dc", "#ef9118", "#3ca951", "#ff725c", "#a463f2", "#2fb5a5", "#9c6b4e", "#f06bab"];
const report = { runs: [], settings: null };

const Blocks = {
  versions: {}, // name -> version, as the server says
  kept: new Map(), // name -> {version, value (a promise)}

  names() {
    if (LIVE) return Object.keys(this.versions);
    return [...document.querySelectorAll('script[id^="block-"]')].map((one) => one.id.slice(6));
  },

  async bytes(name) {
    if (LIVE) {
      const answer = await fetch(`blocks/${encodeURIComponent(name)}`, { cache: "no-store" });
      const changed = answer.headers.get("X-Version") !== this.versions[name];
      if (!answer.ok || changed) throw new Error(`${name} has changed meanwhile`); // the next look finds out
      return answer.arrayBuffer();
    }
    const text = atob(document.getElementById(`block-${name}`).textContent);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    return bytes;
  },

  async read(name) {
    const stream = new Blob([await this.bytes(name)]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  },

  // The value of a block; the newest ones stay in memory.
  get(name) {
    const version = this.versions[name] ?? "";
    const known = this.kept.get(name);
    if (known && known.version === version) return known.value;
    const value = this.read(name);
    value.catch(() => this.kept.delete(name));
    this.kept.set(name, { version, value });
    const details = [...this.kept.keys()].filter((one) => one.startsWith("details-"));
    if (details.length > 24) this.kept.delete(details[0]);
    return value;
  },

  // Ask the server what there is now; returns the names of what is new.
  async look() {
    const answer = await fetch("blocks", { cache: "no-store" });
    if (!answer.ok) throw new Error(`${answer.status}`);
    const versions = await answer.json();
    const changed = new Set(Object.keys(versions).filter((name) => versions[name] !== this.versions[name]));
    for (const name of Object.keys(this.versions)) if (!(name in versions)) changed.add(name);
    this.versions = versions;
    for (const name of this.kept.keys()) if (!(name in versions)) this.kept.delete(name);
    return changed;
  },
};

async function loadRuns() {
  const listed = (await Blocks.get("runs")).runs;
  const shown = new Map(report.runs.map((run) => [run.folder, run.shown]));
  report.settings = await Blocks.get("settings");
  report.runs = await Promise.all(listed.map(async (run, i) => {
    const [curves, timeline, memory, starts] = await Promise.all(
      ["curves", "timeline", "memory", "starts"].map((kind) => Blocks.get(`${kind}-${i}`)));
    const color = RUN_COLORS[i % RUN_COLORS.length];
    return { ...run, place: i, color, curves, timeline, memory, starts, shown: shown.get(run.folder) ?? true };
  }));
}

const shownRuns = () => report.runs.filter((run) => run.shown);
