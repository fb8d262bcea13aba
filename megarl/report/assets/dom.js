// Elements, numbers, the tooltip. Text from a run becomes text nodes, never markup.

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) made.style.setProperty(key, one);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

// A long name, which a line may break after "/", "_" and ".".
const breakable = (name) => name.split(/(?<=[/_.])/).flatMap((part) => [part, document.createElement("wbr")]);

const fmtWhole = (n) => Math.round(n).toLocaleString("en-US");

function fmt(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return fmtWhole(value);
  if (size >= 1e7 || size < 1e-4) return value.toExponential(3);
  return size >= 1000 ? fmtWhole(value) : String(Number(value.toPrecision(5)));
}

function fmtSeconds(s) {
  if (s >= 5400) return `${(s / 3600).toFixed(2)} h`;
  if (s >= 90) return `${(s / 60).toFixed(1)} min`;
  return s >= 1 ? `${s.toFixed(2)} s` : `${(s * 1000).toFixed(s < 0.01 ? 1 : 0)} ms`;
}

const cssColor = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const cssRgb = (name, alpha) => `rgba(${cssColor(name)}, ${alpha})`;

const Tip = {
  box: document.getElementById("tip"),

  show(x, y, ...children) {
    const box = this.box, home = document.querySelector("dialog[open]") ?? document.body;
    if (box.parentElement !== home) home.append(box); // above an open dialog
    box.replaceChildren(...children);
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${Math.max(4, x + 16 + width > innerWidth ? x - width - 12 : x + 16)}px`;
    box.style.top = `${Math.max(4, Math.min(y + 14, innerHeight - height - 6))}px`;
  },
  hide() { this.box.hidden = true; },
};

const tipTable = (rows) => el("table", {}, rows.map(([color, name, value]) => el("tr", {},
  el("td", {}, color ? el("span", { class: "dot", style: { "--c": color } }) : "", name), el("td", {}, value))));

const field = (name, input) => el("label", {}, name, input);
const option = (value, text = value) => el("option", { value }, text);

function later(wait, act) {
  let timer = 0;
  return (...args) => { clearTimeout(timer); timer = setTimeout(() => act(...args), wait); };
}

// A canvas as sharp as the screen; returns its context, in CSS pixels.
function surface(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
