// Line charts on a canvas.

const FONT = "11px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";

// Means that forget: each value weighs `keep` times less a step later; gaps stay gaps.
function smoothed(y, keep) {
  if (!keep) return y;
  let mean = 0, weight = 0;
  return y.map((value) => {
    if (value === null) return null;
    mean = keep * mean + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return mean / weight;
  });
}

function niceTicks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((size) => size >= rough * 0.999) ?? 10 * power;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) ticks.push(i * step);
  return ticks;
}

function logTicks(low, high) {
  const ticks = [], from = Math.floor(low), to = Math.ceil(high);
  const every = Math.max(1, Math.round((to - from) / 5));
  for (let p = from; p <= to; p += every)
    for (const m of to - from <= 2 ? [1, 2, 5] : [1]) {
      const at = p + Math.log10(m);
      if (at >= low - 1e-9 && at <= high + 1e-9) ticks.push(at);
    }
  return ticks;
}

function fmtTick(value, step) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) {
    const digits = Math.floor(Math.log10(size) + 1e-9) - Math.floor(Math.log10(step || size) + 1e-9);
    return value.toExponential(Math.max(0, Math.min(4, digits))).replace("e+", "e");
  }
  if (size >= 1e4) return `${Number((value / 1000).toPrecision(4))}k`;
  return String(Number(value.toFixed(Math.max(0, Math.min(6, 1 - Math.floor(Math.log10(step || size)))))));
}

function extent(values, positive) {
  let low = Infinity, high = -Infinity;
  for (const list of values) for (const v of list)
    if (v !== null && (!positive || v > 0)) { if (v < low) low = v; if (v > high) high = v; }
  return [low, high];
}

// Without the outermost values, which would flatten a smoothed curve.
function middle(y) {
  const sorted = y.filter((value) => value !== null).sort((a, b) => a - b), off = Math.floor(sorted.length * 0.04);
  return sorted.slice(off, sorted.length - off);
}

// series: {name, color, x, y}; options: log, smooth, xName, fmtX. Keeps on the canvas what `readChart` needs.
function drawChart(canvas, series, options) {
  const { width, height } = canvas.getBoundingClientRect();
  if (!width || !height) return;
  const context = surface(canvas, width, height);
  const soft = series.map((one) => smoothed(one.y, options.smooth));
  let [x0, x1] = extent(series.map((one) => one.x), false);
  let [y0, y1] = extent(options.smooth ? [...soft, ...series.map((one) => middle(one.y))] : series.map((one) => one.y),
    options.log);
  context.font = FONT;
  context.textBaseline = "middle";
  if (!(x0 <= x1) || !(y0 <= y1)) {
    context.fillStyle = cssColor("--soft");
    context.textAlign = "center";
    context.fillText(options.log ? "nothing above 0" : "no finite value", width / 2, height / 2);
    canvas.chart = null;
    return;
  }
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  if (options.log) { y0 = Math.log10(y0); y1 = Math.log10(y1); }
  if (y1 - y0 < 1e-12 * Math.max(1, Math.abs(y0))) {
    const room = options.log ? 0.5 : Math.abs(y0) * 0.1 || 0.5;
    y0 -= room; y1 += room;
  } else { const room = (y1 - y0) * 0.06; y0 -= room; y1 += room; }
  const ticks = options.log ? logTicks(y0, y1) : niceTicks(y0, y1, height / 32);
  const label = (t) => options.log ? fmtTick(10 ** t, 10 ** t) : fmtTick(t, ticks.length > 1 ? ticks[1] - ticks[0] : 0);
  const left = 12 + Math.max(18, ...ticks.map((t) => context.measureText(label(t)).width));
  const box = { left, top: 8, right: width - 8, bottom: height - 20 };
  const px = (x) => box.left + (x - x0) / (x1 - x0) * (box.right - box.left);
  const py = (y) => box.bottom - ((options.log ? Math.log10(y) : y) - y0) / (y1 - y0) * (box.bottom - box.top);
  context.lineWidth = 1;
  context.textAlign = "right";
  for (const t of ticks) {
    const at = Math.round(box.bottom - (t - y0) / (y1 - y0) * (box.bottom - box.top)) + 0.5;
    context.strokeStyle = cssColor("--grid");
    context.beginPath(); context.moveTo(box.left, at); context.lineTo(box.right, at); context.stroke();
    context.fillStyle = cssColor("--soft");
    context.fillText(label(t), box.left - 6, at);
  }
  context.textAlign = "center";
  for (const t of niceTicks(x0, x1, width / 62)) {
    if (options.whole && t % 1) continue;
    context.fillText(options.fmtX(t), Math.min(px(t), width - 16), height - 8);
  }
  context.save();
  context.beginPath(); context.rect(box.left - 3, box.top - 4, box.right - box.left + 6, box.bottom - box.top + 8);
  context.clip();
  series.forEach((one, i) => {
    if (options.smooth) line(context, one.x, one.y, px, py, one.color, 1, 0.22, options.log);
    line(context, one.x, soft[i], px, py, one.color, 1.8, 1, options.log);
  });
  context.restore();
  canvas.chart = { series, soft, px, x0, x1, box };
}

function line(context, x, y, px, py, color, width, alpha, log) {
  context.strokeStyle = context.fillStyle = color;
  context.lineWidth = width;
  context.globalAlpha = alpha;
  context.lineJoin = "round";
  context.beginPath();
  let open = false, alone = null;
  const dot = () => { if (alone) { context.moveTo(alone[0] + 2, alone[1]); context.arc(...alone, 2, 0, 7); } };
  const points = x.length <= 24;
  for (let i = 0; i < x.length; i++) {
    if (y[i] === null || (log && y[i] <= 0)) { if (open && alone) dot(); open = false; alone = null; continue; }
    const at = [px(x[i]), py(y[i])];
    if (open) { context.lineTo(...at); alone = null; } else { context.moveTo(...at); alone = at; }
    open = true;
  }
  if (alone) dot();
  context.stroke();
  if (points) for (let i = 0; i < x.length; i++) if (y[i] !== null && !(log && y[i] <= 0)) {
    context.beginPath(); context.arc(px(x[i]), py(y[i]), 2.2, 0, 7); context.fill();
  }
  context.globalAlpha = 1;
}

// Download an enlarged chart as a PNG: its title above, the runs' names and colors below.
function savePicture(canvas, title, series) {
  const { width, height } = canvas.getBoundingClientRect(), row = 20;
  const picture = document.createElement("canvas"), context = surface(picture, width, height + row * (series.length + 1));
  context.fillStyle = getComputedStyle(document.getElementById("dialog")).backgroundColor;
  context.fillRect(0, 0, width, height + row * (series.length + 1));
  context.drawImage(canvas, 0, row, width, height);
  context.font = FONT;
  context.textBaseline = "middle";
  [{ name: title, color: cssColor("--ink") }, ...series].forEach(({ name, color }, i) => {
    context.fillStyle = color;
    context.fillText(name, 12, (i ? height : 0) + row * (i + 0.5));
  });
  el("a", { href: picture.toDataURL("image/png"), download: `${title.replaceAll("/", "_")}.png` }).click();
}

// Values at the pointer: [{name, color, x, value, smooth}].
function readChart(canvas, clientX) {
  const chart = canvas.chart;
  if (!chart) return null;
  const at = clientX - canvas.getBoundingClientRect().left;
  const x = chart.x0 + (at - chart.box.left) / (chart.box.right - chart.box.left) * (chart.x1 - chart.x0);
  return chart.series.map((one, i) => {
    const place = nearest(one.x, x);
    return { name: one.name, color: one.color, x: one.x[place], value: one.y[place], smooth: chart.soft[i][place] };
  });
}

function nearest(sorted, wanted) {
  let low = 0, high = sorted.length - 1;
  while (low < high) { const mid = (low + high) >> 1; if (sorted[mid] < wanted) low = mid + 1; else high = mid; }
  return low > 0 && wanted - sorted[low - 1] < sorted[low] - wanted ? low - 1 : low;
}
