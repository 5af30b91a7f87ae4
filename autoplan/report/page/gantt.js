// The schedule of a pipeline: a row a stage, in it passes, waits, messages and the end of the step, and below them the
// memory of the fullest stage.  A canvas, as a step may have hundreds of thousands of passes.

function unpacked(text, Numbers) {
  return new Numbers(Uint8Array.from(atob(text), (one) => one.charCodeAt(0)).buffer);
}

function gantt(figure) {
  const { step_s, rows, memory } = contentOf(figure), frame = figure.querySelector(".canvas");
  const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
  frame.append(canvas);
  for (const row of rows) {
    row.codes = unpacked(row.codes, Uint16Array);
    row.starts = unpacked(row.starts, Float32Array);
    for (const part of [row.messages, row.waits]) {
      part.starts = unpacked(part.starts, Float32Array);
      part.seconds = unpacked(part.seconds, Float32Array);
    }
    row.waits.sends = unpacked(row.waits.sends, Uint8Array);
    row.microbatches = numbered(row);
  }
  memory.time = unpacked(memory.time, Float32Array);
  memory.bytes = unpacked(memory.bytes, Float32Array);

  const ROW = rows.length > 24 ? 16 : rows.length > 12 ? 22 : 28, GAP = 3, STRIP = 4, DENSE = 1.2;
  const body = ROW - STRIP, LEFT = 34, TOP = 22, MEMORY = 72, BETWEEN = 26;
  const bottom = TOP + rows.length * (ROW + GAP), height = bottom + BETWEEN + MEMORY + 4;
  const range = new Range(0, step_s);
  const area = () => ({ left: LEFT, top: TOP, width: frame.clientWidth - LEFT - 1, height: bottom - TOP });
  const place = (time) => LEFT + area().width * range.share(time);

  // A moment of the step, as exact as steps of `exact` seconds need.
  const [size, unit] = step_s >= 1 ? [1, "s"] : step_s >= 1e-3 ? [1e3, "ms"] : [1e6, "\u00b5s"];
  function moment(time, exact) {
    return `${(time * size).toFixed(Math.max(Math.ceil(-Math.log10(exact * size) - 1e-9), 0))} ${unit}`;
  }

  // From the first of these sorted times that is in view, or the one before it.
  function firstInView(starts) {
    let low = 0, high = starts.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (starts[middle] < range.low) low = middle + 1;
      else high = middle;
    }
    return Math.max(low - 1, 0);
  }

  function draw() {
    const width = frame.clientWidth, scale = devicePixelRatio || 1;
    if (width < 80) return;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.height = `${height}px`;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.font = `12px ${getComputedStyle(frame).fontFamily}`;
    const colours = Object.fromEntries(
      ["ground", "ink", "quiet", "line", "track", "wait", "end", "host", "traffic", "forward", "backward", "compute",
        "input-gradient", "weight-gradient", "m-activations", "bad"].map((name) => [name, colour(name)]));
    const hatched = hatch(colours.track, colours.wait, scale);

    context.fillStyle = colours.quiet;
    context.textBaseline = "middle";
    context.textAlign = "center";
    const ticks = range.ticks(Math.max(area().width / 110, 2));
    for (const time of ticks) {
      const x = Math.min(Math.max(place(time), LEFT + 14), width - 24);
      context.fillText(moment(time, ticks[1] - ticks[0]), x, 8);
    }
    context.textAlign = "right";
    rows.forEach((row, at) => context.fillText(row.stage, LEFT - 8, TOP + at * (ROW + GAP) + ROW / 2));

    context.save();
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT, height);
    context.clip();
    rows.forEach((row, at) => drawRow(row, TOP + at * (ROW + GAP), colours, hatched));
    drawMemory(bottom + BETWEEN, colours);
    context.restore();
  }

  function drawPass(row, at, y, colours) {
    const kind = row.kinds[row.codes[at]], x = place(row.starts[at]), wide = place(row.starts[at] + kind.seconds) - x;
    const room = wide > 5 ? 1 : 0;
    context.fillStyle = colours[kind.colour];
    context.fillRect(x, y, wide - room, body);
    context.fillStyle = colours.traffic;
    context.fillRect(x, y + body - STRIP, (wide - room) * kind.traffic, STRIP);
    if (wide < 34) return;
    context.fillStyle = kind.colour === "forward" ? "#10161c" : "#ffffff";
    context.textAlign = "left";
    context.fillText(row.microbatches[at], Math.max(x, LEFT) + 5, y + (body - STRIP) / 2 + 1, wide - 8);
  }

  // Passes too thin to tell apart: of every `pixels` the shares of what happens there, one below the other.
  function drawShares(row, first, last, y, pixels, colours) {
    const bins = Math.ceil(area().width / pixels), shares = {};
    const add = (name, from, to, weight) => {
      const share = (shares[name] ??= new Float32Array(bins));
      const low = Math.max((place(from) - LEFT) / pixels, 0), high = Math.min((place(to) - LEFT) / pixels, bins);
      for (let bin = Math.floor(low); bin < high; bin++) share[bin] += weight * (Math.min(bin + 1, high) - Math.max(bin, low));
    };
    for (let at = first; at < last; at++) {
      const kind = row.kinds[row.codes[at]], start = row.starts[at];
      add(kind.colour, start, start + kind.seconds, 1 - kind.traffic);
      if (kind.traffic) add("traffic", start, start + kind.seconds, kind.traffic);
    }
    const filled = new Float32Array(bins);
    for (const name of ["forward", "backward", "input-gradient", "weight-gradient", "traffic"]) {
      context.fillStyle = colours[name];
      for (let bin = 0; bin < bins && shares[name]; bin++) {
        context.fillRect(LEFT + bin * pixels, y + body * filled[bin], pixels, body * shares[name][bin]);
        filled[bin] += shares[name][bin];
      }
    }
  }

  function drawRow(row, y, colours, hatched) {
    context.fillStyle = colours.track;
    context.fillRect(LEFT, y, area().width, ROW);
    for (let at = firstInView(row.waits.starts); at < row.waits.starts.length; at++) {
      const start = row.waits.starts[at];
      if (start > range.high) break;
      const x = place(start), end = place(start + row.waits.seconds[at]);
      context.fillStyle = row.waits.sends[at] ? colours.traffic : hatched;
      context.fillRect(x, y, end - x, body);
    }
    const first = firstInView(row.starts);
    let last = first;
    while (last < row.starts.length && row.starts[last] <= range.high) last++;
    const each = area().width / Math.max(last - first, 1); // pixels, of a pass in the mean
    if (each < DENSE) drawShares(row, first, last, y, Math.max(Math.round(10 * each), 1), colours);
    else for (let at = first; at < last; at++) drawPass(row, at, y, colours);
    context.fillStyle = colours.traffic;
    for (let at = firstInView(row.messages.starts), until = -1; at < row.messages.starts.length; at++) {
      const start = row.messages.starts[at];
      if (start > range.high) break;
      const x = place(start), end = Math.max(place(start + row.messages.seconds[at]), x + 0.6);
      if (end - until < 0.6) continue;
      until = end;
      context.fillRect(x, y + body + 1, end - x, STRIP - 1);
    }
    for (const [, name, start, length, beside] of row.others) {
      const x = place(start);
      context.fillStyle = colours[name];
      if (beside) context.fillRect(x, y + body + 1, place(start + length) - x, STRIP - 1);
      else context.fillRect(x, y, Math.max(place(start + length) - x, 1), body);
    }
  }

  // What the fullest stage holds, beside what its device has.
  function drawMemory(top, colours) {
    const most = Math.max(memory.capacity, ...[memory.bytes.reduce((a, b) => Math.max(a, b), 0)]) * 1.05;
    const y = (bytes) => top + MEMORY * (1 - bytes / most);
    context.fillStyle = colours.quiet;
    context.textAlign = "left";
    context.fillText(`memory of ${memory.stage}; line: ${gib(memory.capacity)} capacity`, LEFT, top - 10);
    context.fillStyle = colours["m-activations"];
    context.beginPath();
    context.moveTo(LEFT, top + MEMORY);
    let last = -1;
    for (let at = firstInView(memory.time); at < memory.time.length && memory.time[at] <= range.high; at++) {
      const x = Math.max(place(memory.time[at]), LEFT);
      const held = Math.max(memory.bytes[at], x - last < 0.6 ? memory.bytes[at - 1] ?? 0 : 0);
      context.lineTo(x, y(memory.bytes[Math.max(at - 1, 0)]));
      context.lineTo(x, y(held));
      last = x;
    }
    const now = held(range.high);
    context.lineTo(LEFT + area().width, y(now));
    context.lineTo(LEFT + area().width, top + MEMORY);
    context.globalAlpha = 0.5;
    context.fill();
    context.globalAlpha = 1;
    context.fillStyle = colours.ink;
    context.fillRect(LEFT, y(memory.capacity), area().width, 1.5);
  }

  function held(time) {
    let low = 0, high = memory.time.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (memory.time[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return memory.bytes[Math.max(low - 1, 0)];
  }

  function told(row, time, inStrip) {
    const exact = (range.high - range.low) / 1e3;
    const span = (start, length) => `${seconds(length)}, from ${moment(start, exact)} to ${moment(start + length, exact)}`;
    const among = (starts, lengths, margin = 0) => {
      let found = -1;
      for (let at = 0; at < starts.length && starts[at] <= time + margin; at++) if (time <= starts[at] + lengths(at) + margin) found = at;
      return found;
    };
    const where = `${row.where}, rank${/^\d+$/.test(row.ranks) ? "" : "s"} ${row.ranks}`;
    const near = 2 * (range.high - range.low) / area().width;
    if (inStrip) {
      const at = among(row.messages.starts, (one) => row.messages.seconds[one], near);
      if (at >= 0) return `message\n${span(row.messages.starts[at], row.messages.seconds[at])}\n${where}`;
    }
    for (const [name, , start, length, beside] of row.others) {
      if (beside === inStrip && start <= time && time <= start + length) return `${name}\n${span(start, length)}\n${where}`;
    }
    const pass = among(row.starts, (at) => row.kinds[row.codes[at]].seconds);
    if (pass >= 0) {
      const kind = row.kinds[row.codes[pass]];
      const traffic = kind.traffic > 0.0005 ? `\n${(100 * kind.traffic).toFixed(1)} % communication that shows` : "";
      return `${kind.name} of micro-batch ${row.microbatches[pass]}, chunk ${kind.chunk}\n${span(row.starts[pass], kind.seconds)}${traffic}\n${where}`;
    }
    const wait = among(row.waits.starts, (at) => row.waits.seconds[at]);
    if (wait < 0) return "";
    const name = row.waits.sends[wait] ? "wait for a message" : "bubble";
    return `${name}\n${span(row.waits.starts[wait], row.waits.seconds[wait])}\n${where}`;
  }

  movable(figure, frame, { x: range }, area, draw);
  frame.addEventListener("pointermove", (event) => {
    if (event.buttons) return;
    const box = frame.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const time = range.at((x - LEFT) / area().width), at = Math.floor((y - TOP) / (ROW + GAP));
    let text = "";
    if (x >= LEFT && rows[at]) text = told(rows[at], time, y - TOP - at * (ROW + GAP) > ROW - STRIP);
    else if (x >= LEFT && y > bottom + BETWEEN) text = `${gib(held(time))} on ${memory.stage}\nat ${moment(time, step_s / 1e3)}`;
    if (text) showTip(text, event.clientX, event.clientY);
    else hideTip();
  });
  frame.addEventListener("pointerleave", hideTip);
}

// The micro-batch of every pass: they go through each chunk in their order.
function numbered(row) {
  const counts = new Uint32Array(row.kinds.length);
  return Uint32Array.from(row.codes, (code) => counts[code]++);
}

function gib(bytes) {
  return `${(bytes / 2 ** 30).toFixed(1)} GiB`;
}

function hatch(ground, line, scale) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const brush = tile.getContext("2d");
  brush.fillStyle = ground;
  brush.fillRect(0, 0, 6, 6);
  brush.strokeStyle = line;
  brush.lineWidth = 2;
  brush.beginPath();
  for (const from of [-6, 0, 6]) {
    brush.moveTo(from, 6);
    brush.lineTo(from + 6, 0);
  }
  brush.stroke();
  const pattern = tile.getContext("2d").createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / scale));
  return pattern;
}

document.querySelectorAll("figure.gantt").forEach(gantt);
