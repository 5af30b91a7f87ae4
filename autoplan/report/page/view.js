// What charts have in common: the part of an axis that is in view, how people move it, the tip, and colours.

// A part of an axis, within the whole of it.
class Range {
  constructor(low, high) {
    this.whole = [low, high];
    this.showAll();
  }
  showAll() {
    [this.low, this.high] = this.whole;
  }
  // Make what is in view `factor` times as long; what is at `place` (0 to 1) stays there.
  zoom(factor, place) {
    const [low, high] = this.whole;
    const span = Math.min(Math.max((this.high - this.low) * factor, (high - low) / 2e4), high - low);
    const fixed = this.low + place * (this.high - this.low);
    this.low = Math.min(Math.max(fixed - place * span, low), high - span);
    this.high = this.low + span;
  }
  // Move by a share of what is in view.
  move(share) {
    const [low, high] = this.whole, span = this.high - this.low;
    this.low = Math.min(Math.max(this.low + share * span, low), high - span);
    this.high = this.low + span;
  }
  share(value) {
    return (value - this.low) / (this.high - this.low);
  }
  at(share) {
    return this.low + share * (this.high - this.low);
  }
  // Round values in view, `most` at most.
  ticks(most) {
    const rough = (this.high - this.low) / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
    const first = Math.ceil(this.low / step);
    return Array.from({ length: Math.floor(this.high / step) - first + 1 }, (_, at) => (first + at) * step);
  }
}

// Let pointer, wheel, keys and buttons move `ranges` ({x} or {x, y}); `area()` is where they are drawn, in the frame.
function movable(figure, frame, ranges, area, draw) {
  const places = (event) => {
    const box = frame.getBoundingClientRect(), { left, top, width, height } = area();
    return { x: (event.clientX - box.left - left) / width, y: 1 - (event.clientY - box.top - top) / height };
  };
  const each = (change) => {
    for (const [axis, range] of Object.entries(ranges)) change(range, axis);
    hideTip();
    draw();
  };
  const zoom = (factor, place = { x: 0.5, y: 0.5 }) => each((range, axis) => range.zoom(factor, place[axis]));
  const move = (by) => each((range, axis) => range.move(by[axis] ?? 0));
  const showAll = () => each((range) => range.showAll());

  frame.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) zoom(1.0015 ** event.deltaY, places(event));
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) move({ x: event.deltaX / area().width });
    else return; // the page scrolls
    event.preventDefault();
  }, { passive: false });
  frame.addEventListener("dblclick", (event) => zoom(0.5, places(event)));

  const held = new Map(); // pointers that are down
  frame.addEventListener("pointerdown", (event) => {
    held.set(event.pointerId, places(event));
    frame.setPointerCapture(event.pointerId);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    frame.addEventListener(name, (event) => held.delete(event.pointerId));
  }
  frame.addEventListener("pointermove", (event) => {
    const before = held.get(event.pointerId);
    if (!before) return;
    const now = places(event), [other] = [...held].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
    held.set(event.pointerId, now);
    if (!other) return move({ x: before.x - now.x, y: before.y - now.y });
    const apart = Math.abs(now.x - other.x);
    if (apart > 0.02) zoom(Math.abs(before.x - other.x) / apart, other);
  });

  const keys = {
    ArrowLeft: () => move({ x: -0.1 }), ArrowRight: () => move({ x: 0.1 }),
    ArrowUp: () => move({ y: 0.1 }), ArrowDown: () => move({ y: -0.1 }),
    "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), 0: showAll, Home: showAll,
  };
  frame.addEventListener("keydown", (event) => {
    const vertical = event.key === "ArrowUp" || event.key === "ArrowDown";
    if (event.ctrlKey || event.metaKey || !(event.key in keys) || (vertical && !ranges.y)) return;
    keys[event.key]();
    event.preventDefault();
  });
  const buttons = { in: () => zoom(0.5), out: () => zoom(2), all: showAll };
  for (const button of figure.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", buttons[button.dataset.zoom]);
  }
  new ResizeObserver(draw).observe(frame);
  addEventListener("recolour", function redraw() {
    if (figure.isConnected) draw();
    else removeEventListener("recolour", redraw); // another figure took its place
  });
}

const tip = document.getElementById("tip");

function showTip(text, x, y) {
  tip.textContent = text;
  tip.style.visibility = "visible";
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(Math.min(x + 14, innerWidth - width - 8), 8)}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? y - height - 10 : y + 18}px`;
}

function hideTip() {
  tip.style.visibility = "hidden";
}

// What a colour of the style sheet is at present, for canvases.
function colour(name) {
  tip.style.outlineColor = `var(--${name})`;
  return getComputedStyle(tip).outlineColor;
}

function seconds(value) {
  const size = Math.abs(value);
  if (size >= 100) return `${value.toFixed(1)} s`;
  if (size >= 1) return `${value.toFixed(2)} s`;
  return size >= 1e-3 ? `${(value * 1e3).toFixed(1)} ms` : `${(value * 1e6).toFixed(1)} \u00b5s`;
}

function contentOf(figure) {
  return JSON.parse(figure.querySelector("script.content").textContent);
}
