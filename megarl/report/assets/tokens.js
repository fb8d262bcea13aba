// A response token by token: colour for what is known of each.

const Tokens = {
  by: "advantage",
  NAMES: { logp: "log-probability", advantage: "advantage", gap: "train/rollout gap", "": "no colour" },

  tools(record, redraw) {
    const there = ["advantage", "logp", "gap"].filter((name) => record[name]);
    if (!there.length) return el("span", { class: "scale" }, "nothing is recorded of its tokens");
    const by = this.kind(record);
    const pick = el("select", { id: "color" }, [...there, ""].map((name) => option(name, this.NAMES[name])));
    pick.value = by;
    pick.addEventListener("change", () => { this.by = pick.value; redraw(); });
    return [field("colour", pick), by ? this.scale(record, by) : ""];
  },

  kind(record) {
    if (this.by === "" || record[this.by]) return this.by;
    return ["advantage", "logp", "gap"].find((name) => record[name]) ?? "";
  },

  // The value that has the full colour.
  most(record, by) {
    if (by === "logp") return 5;
    const least = by === "gap" ? 0.01 : 1e-6;
    return record[by].reduce((most, v) => Math.max(most, Math.abs(v ?? 0)), least);
  },

  color(by, value, most) {
    if (value === null) return cssRgb("--bad", 0.9);
    const part = Math.min(1, Math.abs(value) / most);
    if (by === "logp") return cssRgb("--hot", 0.75 * part);
    return cssRgb(value < 0 ? "--bad" : "--good", 0.55 * part);
  },

  scale(record, by) {
    const most = this.most(record, by), steps = by === "logp" ? [0, -most / 2, -most] : [-most, 0, most];
    const stops = steps.map((value) => this.color(by, value, most)).join(", ");
    const bar = el("i", { style: { background: `linear-gradient(90deg, ${stops})` } });
    return el("span", { class: "scale" }, fmt(steps[0]), bar, fmt(steps[2]));
  },

  response(record, text) {
    if (record.turns) return this.turns(record);
    if (!record.tokens) return el("div", { class: "text", id: "response" }, text);
    return el("div", { class: "text", id: "response" }, this.spans(record, 0, record.tokens.length));
  },

  // Of an episode, who said what.
  turns(record) {
    const made = el("div", { id: "response" });
    const counted = record.tokens && record.turn_lengths?.reduce((a, b) => a + b, 0) === record.tokens.length;
    let at = 0;
    record.turns.forEach(([who, text], i) => {
      const length = record.turn_lengths?.[i] ?? 0, kind = who === "policy" ? "policy" : "environment";
      made.append(el("div", { class: `who ${kind}` }, who),
        el("div", { class: `text turn ${kind}` }, counted ? this.spans(record, at, at + length, kind !== "policy")
          : text));
      at += length;
    });
    return made;
  },

  spans(record, from, to, plain = false) {
    const by = plain ? "" : this.kind(record), most = by ? this.most(record, by) : 1, made = [];
    for (let i = from; i < to; i++) {
      const text = record.tokens[i];
      if (!text) continue;
      const token = el("span", { class: /^<[^\s]*>$/.test(text) ? "tok special" : "tok" }, text.replaceAll("\n",
        "⏎\n"));
      if (by) token.style.backgroundColor = this.color(by, record[by][i], most);
      token.addEventListener("pointermove", (event) => this.tell(event, record, i));
      token.addEventListener("pointerleave", () => Tip.hide());
      made.push(token);
    }
    return made;
  },

  tell(event, record, i) {
    const rows = [["", "token", JSON.stringify(record.tokens[i])]];
    const p = record.logp?.[i];
    if (p !== undefined) rows.push(["", "log-probability",
      `${fmt(p)}${p === null ? "" : `  (${(100 * Math.exp(p)).toPrecision(3)}%)`}`]);
    if (record.advantage) rows.push(["", "advantage", fmt(record.advantage[i])]);
    if (record.gap) rows.push(["", "train/rollout gap", fmt(record.gap[i])]);
    Tip.show(event.clientX, event.clientY, tipTable(rows));
  },
};
