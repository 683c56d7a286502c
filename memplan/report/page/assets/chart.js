"use strict";
// Memory over one step: stacked components that can be hovered, stepped through and zoomed.
(() => {
  const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
  const $ = (id) => document.getElementById(id);
  const shown = (size) => {
    const [unit, scale] = UNITS.find(([, s]) => size >= s * (1 - 0.05 / 1024)) || ["B", 1];
    return scale === 1 ? `${size} B` : `${(size / scale).toFixed(2)} ${unit}`;
  };
  const root = document.documentElement;
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const dark = () => matchMedia("(prefers-color-scheme: dark)").matches && !root.classList.contains("printing");
  const area = (hex) => (hex === "#000000" && dark() ? "#f2f2f2" : hex);
  let chart = null, data = null;

  // Each series is drawn from the bottom of the chart over those before it: the top of the stack comes first.
  function series(unit) {
    const count = data.sizes[0].length;
    const xs = Array.from({length: count + 1}, (_, i) => i);
    const last = (values) => [...values, values[count - 1]];
    const stacked = [], options = [{}];
    let below = new Array(count).fill(data.context);
    const layers = [[below, data.contextColour, "device_context"]];
    data.components.forEach((name, i) => {
      below = below.map((size, j) => size + data.sizes[i][j]);
      layers.push([below, data.colours[i], name]);
    });
    const stepped = uPlot.paths.stepped({align: 1});
    for (const [sizes, hex, label] of layers.reverse()) {
      stacked.push(last(sizes.map((size) => size / unit)));
      options.push({label, width: 0, fill: area(hex), paths: stepped, points: {show: false}});
    }
    return [[xs, ...stacked], options];
  }

  // Where a job takes a small part of the GPU, the chart is as high as the job, and says what lies beyond it.
  const beyond = (job) => data.usable > 2.5 * job;

  function marks(u, unit) {
    const {ctx, bbox} = u, ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    ctx.textBaseline = "bottom";
    ctx.lineWidth = ratio;
    ctx.strokeStyle = colour("--quiet");
    for (const [, first] of data.phases.slice(1)) {
      const x = u.valToPos(first, "x", true);
      line(ctx, x, bbox.top, x, bbox.top + bbox.height, []);
    }
    const late = data.peak > data.sizes[0].length / 2, far = late ? "left" : "right";
    const limits = [["usable", data.usable, "--no", [], far], ["expected", data.expected, "--text", [6, 4], far]];
    for (const [name, size, tone, dash, side] of limits) {
      const above = size / unit > u.scales.y.max, y = above ? bbox.top + 18 * ratio : u.valToPos(size / unit, "y", true);
      ctx.strokeStyle = colour(tone);
      ctx.textAlign = side;
      if (!above) line(ctx, bbox.left, y, bbox.left + bbox.width, y, dash.map((one) => one * ratio));
      write(ctx, `${name} ${shown(size)}${above ? " (above)" : ""}`, side === "left" ? bbox.left + 6 * ratio : bbox.left + bbox.width - 6 * ratio, y - 4 * ratio, colour(tone));
    }
    const x = u.valToPos(data.peak + 0.5, "x", true), y = u.valToPos((data.context + total(data.peak)) / unit, "y", true);
    ctx.fillStyle = colour("--text");
    ctx.beginPath();
    ctx.arc(x, y, 4 * ratio, 0, 2 * Math.PI);
    ctx.fill();
    const label = `peak ${shown(total(data.peak))} + ${shown(data.context)} context`, start = x + (late ? -12 * ratio - ctx.measureText(label).width : 12 * ratio);
    if (bbox.width < 420 * ratio) return ctx.restore();
    ctx.textAlign = "left";
    write(ctx, label, start, y - 8 * ratio, colour("--text"));
    ctx.restore();
  }

  // Words stand on a ground of their own: lines and layers run behind them.
  function write(ctx, words, x, y, tone) {
    const ratio = devicePixelRatio, {width} = ctx.measureText(words);
    ctx.fillStyle = colour("--panel");
    ctx.fillRect((ctx.textAlign === "right" ? x - width : x) - 3 * ratio, y - 15 * ratio, width + 6 * ratio, 16 * ratio);
    ctx.fillStyle = tone;
    ctx.fillText(words, x, y);
  }

  function line(ctx, x, y, toX, toY, dash) {
    ctx.setLineDash(dash);
    ctx.beginPath();
    ctx.moveTo(x, y);
    ctx.lineTo(toX, toY);
    ctx.stroke();
    ctx.setLineDash([]);
  }

  const total = (column) => data.sizes.reduce((sum, sizes) => sum + sizes[column], 0);
  const phaseOf = (column) => data.phases.find(([, first, last]) => first <= column && column <= last)[0];

  function show(column) {
    const text = `${phaseOf(column)}: ${shown(total(column))} live, ${shown(total(column) + data.context)} with the context`;
    $("readout").textContent = column === data.peak ? `${text} (peak, ${data.peakInstant})` : text;
    $("moment").value = column;
    $("moment").setAttribute("aria-valuetext", text);
    data.components.forEach((name, i) => {
      const cell = document.querySelector(`[data-now="${name}"]`);
      if (cell) cell.textContent = shown(data.sizes[i][column]);
    });
  }

  function pointAt(column) {
    chart.setCursor({left: chart.valToPos(column + 0.5, "x"), top: 0}, false);
    show(column);
  }

  function zoom(factor) {
    const count = data.sizes[0].length, {min, max} = chart.scales.x;
    const middle = factor < 1 ? Number($("moment").value) + 0.5 : (min + max) / 2;
    const half = Math.max(4, Math.min(count, (max - min) * factor)) / 2;
    const from = Math.max(0, Math.min(middle - half, count - 2 * half));
    chart.setScale("x", {min: from, max: Math.min(count, from + 2 * half)});
  }

  function labels(u) {
    const [, min, max] = [0, u.scales.x.min, u.scales.x.max], width = u.bbox.width / devicePixelRatio;
    const places = [], names = [];
    for (const [name, first, last] of data.phases) {
      const from = Math.max(first, min), to = Math.min(last + 1, max);
      if (to > from && ((to - from) / (max - min)) * width > 7 * name.length) {
        places.push((from + to) / 2);
        names.push(name);
      }
    }
    return [places, names];
  }

  function draw() {
    const box = $("chart");
    if (!data || !box) return;
    const job = Math.max(data.expected, data.context + total(data.peak)), top = beyond(job) ? 1.6 * job : Math.max(job, data.usable);
    const unit = top >= 2 ** 30 ? 2 ** 30 : 2 ** 20, name = unit === 2 ** 30 ? "GiB" : "MiB";
    const [values, options] = series(unit), count = data.sizes[0].length;
    const axis = {stroke: colour("--text"), grid: {stroke: colour("--line"), width: 1}, ticks: {show: false}};
    if (chart) chart.destroy();
    chart = new uPlot({
      width: box.clientWidth, height: box.clientWidth < 500 ? 300 : 380, legend: {show: false},
      scales: {x: {time: false, range: (u, min, max) => [Math.max(0, min), Math.min(count, max)]}, y: {range: [0, (1.12 * top) / unit]}},
      axes: [
        {...axis, grid: {show: false}, splits: (u) => labels(u)[0], values: (u) => labels(u)[1]},
        {...axis, size: 64, values: (u, ticks) => ticks.map((tick) => `${tick} ${name}`)},
      ],
      series: options,
      cursor: {y: false, points: {show: false}, drag: {x: true, y: false}},
      hooks: {
        draw: [(u) => marks(u, unit)],
        setCursor: [(u) => { if (u.cursor.left >= 0) show(Math.min(count - 1, Math.max(0, Math.floor(u.posToVal(u.cursor.left, "x"))))); }],
      },
    }, values, box);
    show(Math.min(Number($("moment").value), count - 1));
  }

  function copy(button) {
    const said = button.textContent;
    navigator.clipboard.writeText($(button.dataset.copy).textContent).then(
      () => { button.textContent = "Copied"; setTimeout(() => { button.textContent = said; }, 1200); },
      () => getSelection().selectAllChildren($(button.dataset.copy)),
    );
  }

  document.addEventListener("input", (event) => { if (event.target.id === "moment" && chart) pointAt(Number(event.target.value)); });
  document.addEventListener("click", ({target}) => {
    if (target.dataset.copy) copy(target);
    if (target.dataset.zoom && chart) zoom({in: 0.5, out: 2, all: Infinity}[target.dataset.zoom]);
  });
  let wait = 0;
  addEventListener("resize", () => { clearTimeout(wait); wait = setTimeout(draw, 100); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((one) => { one.open = true; });
    root.classList.add("printing");
    draw();
  });
  addEventListener("afterprint", () => { root.classList.remove("printing"); draw(); });

  window.memplanChart = (content) => { data = content; draw(); };
  const own = $("timeline");
  if (own) window.memplanChart(JSON.parse(own.textContent));
})();
