// Points and lines over two axes, as plot.py has them.

const HEIGHT = 360, MARGINS = { left: 64, right: 16, top: 28, bottom: 44 };

function svg(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function plot(figure) {
  const { x, y, series, limit } = contentOf(figure), frame = figure.querySelector(".canvas");
  const points = series.flatMap((one) => one.points);
  const scaled = (axis, value) => (axis.scale === "log" ? Math.log10(value) : value);
  const range = (axis, values) => {
    const low = Math.min(...values.map((one) => scaled(axis, one))), high = Math.max(...values.map((one) => scaled(axis, one)));
    const room = 0.08 * (high - low) || 0.1 * Math.abs(high) || 1;
    return new Range(low - room, high + room);
  };
  const ranges = {
    x: range(x, [...points.map((one) => one[0]), ...(limit ? [limit[0]] : [])]),
    y: range(y, points.map((one) => one[1])),
  };
  const area = () => ({
    left: MARGINS.left, top: MARGINS.top,
    width: frame.clientWidth - MARGINS.left - MARGINS.right, height: HEIGHT - MARGINS.top - MARGINS.bottom,
  });

  // (value, its place) of round values in view: of a logarithmic axis powers of its base, or of ten and their 2- and
  // 5-folds where these are few.
  const ticks = (axis, one, most) => {
    if (axis.scale !== "log") return one.ticks(most).map((value) => [value, value]);
    const powers = (base, folds) => {
      const first = Math.floor(one.low / Math.log10(base)), last = Math.floor(one.high / Math.log10(base));
      const all = Array.from({ length: last - first + 1 }, (_, at) => base ** (first + at));
      return all.flatMap((value) => folds.map((fold) => value * fold));
    };
    const inView = (values) => values.map((value) => [value, Math.log10(value)]).filter(([, at]) => at >= one.low && at <= one.high);
    const choices = axis.base === 2 ? [powers(2, [1])] : [powers(10, [1]), powers(10, [1, 2, 5])];
    const found = choices.map(inView).find((values) => values.length > 2) ?? inView(choices.at(-1));
    const every = Math.ceil(found.length / most);
    if (found.length > 1) return found.filter((_, at) => at % every === 0);
    const low = 10 ** one.low, high = 10 ** one.high;
    return new Range(low, high).ticks(most).map((value) => [value, Math.log10(value)]);
  };
  const digits = new Intl.NumberFormat("en", { maximumSignificantDigits: 6 });
  const written = (value) => (value >= 1e6 ? `${digits.format(value / 1e6)}M` : digits.format(value));

  let dots = [];
  function draw() {
    const { left, top, width, height } = area();
    if (width < 40) return;
    const placeX = (value) => left + width * ranges.x.share(value), placeY = (value) => top + height * (1 - ranges.y.share(value));
    const place = ([a, b]) => [placeX(scaled(x, a)), placeY(scaled(y, b))];
    const drawn = svg("svg", { viewBox: `0 0 ${width + left + MARGINS.right} ${HEIGHT}`, height: HEIGHT, "aria-hidden": "true" });
    for (const [value, at] of ticks(x, ranges.x, Math.max(width / 80, 4))) {
      drawn.append(svg("line", { class: "grid", x1: placeX(at), x2: placeX(at), y1: top, y2: top + height }));
      drawn.append(svg("text", { x: placeX(at), y: top + height + 18, "text-anchor": "middle" }, written(value)));
    }
    for (const [value, at] of ticks(y, ranges.y, height / 45)) {
      drawn.append(svg("line", { class: "grid", x1: left, x2: left + width, y1: placeY(at), y2: placeY(at) }));
      drawn.append(svg("text", { x: left - 8, y: placeY(at) + 4, "text-anchor": "end" }, written(value)));
    }
    drawn.append(svg("text", { x: left + width, y: HEIGHT - 6, "text-anchor": "end" }, x.label));
    drawn.append(svg("text", { x: 0, y: 14 }, y.label));
    const clipped = svg("svg", { x: left, y: top, width, height, viewBox: `${left} ${top} ${width} ${height}` });
    drawn.append(clipped);
    if (limit) {
      const at = placeX(scaled(x, limit[0]));
      clipped.append(svg("line", { x1: at, x2: at, y1: top, y2: top + height, stroke: "var(--ink)", "stroke-width": 2 }));
      clipped.append(svg("text", { x: at - 6, y: top + 14, "text-anchor": "end" }, limit[1]));
    }
    dots = [];
    for (const one of series) {
      const stroke = `var(--${one.colour})`, placed = one.points.map(place);
      if (one.kind !== "point" && placed.length > 1) {
        const path = placed.map(([a, b], at) => (at === 0 ? `M${a} ${b}` : one.kind === "steps" ? `H${a}V${b}` : `L${a} ${b}`)).join("");
        const dashes = one.kind === "dashes" ? { "stroke-dasharray": "4 5" } : {};
        clipped.append(svg("path", { d: path, fill: "none", stroke, "stroke-width": one.kind === "line" ? 2 : 1.5, ...dashes }));
      }
      if (one.kind === "dashes") continue;
      placed.forEach(([cx, cy], at) => {
        const r = one.kind === "point" ? 6 : 4;
        clipped.append(svg("circle", { class: "dot", cx, cy, r, fill: stroke }));
        dots.push({ cx, cy, text: one.points[at][2] });
      });
    }
    frame.replaceChildren(drawn);
  }
  movable(figure, frame, ranges, area, draw);
  frame.addEventListener("pointermove", (event) => {
    const box = frame.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    const apart = (dot) => Math.hypot(dot.cx - px, dot.cy - py);
    const near = dots.reduce((a, b) => (apart(b) <= apart(a) ? b : a), dots[0]); // of two in one place the upper one
    if (near && apart(near) < 24) showTip(near.text, event.clientX, event.clientY);
    else hideTip();
  });
  frame.addEventListener("pointerleave", hideTip);
}

document.querySelectorAll("figure.plot").forEach(plot);
