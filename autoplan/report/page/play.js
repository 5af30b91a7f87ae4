// Controls of a page that is served: what they hold is priced there, and the sections that come back replace those shown.

const form = document.getElementById("values"), refused = document.getElementById("refused");
const moved = document.getElementById("moved"), first = valuesOf();
let pins = [], latest = 0, timer = 0;

function valuesOf() {
  return Object.fromEntries(new FormData(form));
}

function setValues(values) {
  for (const [name, value] of Object.entries(values)) form.elements[name].value = value;
}

// The answer to what the controls hold and to the plans `kept`; a refusal is said, and is null.
async function ask(path, kept) {
  try {
    const answer = await fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ values: valuesOf(), pinned: kept }),
    });
    if (answer.ok) return answer;
    refused.textContent = await answer.text();
  } catch {
    refused.textContent = "autoplan does not answer: start autoplan report --serve again.";
  }
  return null;
}

async function move(kept = pins) {
  const turn = ++latest;
  const answer = await ask("price", kept);
  if (turn !== latest || !answer) return;
  const { status, parts } = await answer.json();
  if (turn !== latest) return;
  pins = kept;
  refused.textContent = "";
  moved.textContent = status;
  hideTip();
  for (const [name, text] of Object.entries(parts)) {
    const old = document.getElementById(name), opened = [...old.querySelectorAll("details")].map((one) => one.open);
    old.outerHTML = text;
    document.getElementById(name).querySelectorAll("details").forEach((one, at) => { one.open = opened[at] ?? false; });
  }
  document.querySelectorAll("figure.gantt").forEach(gantt);
  dispatchEvent(new Event("recolour"));
}

async function save() {
  const answer = await ask("page", pins);
  if (!answer) return;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await answer.blob());
  link.download = "report.html";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

form.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(move, 200);
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  move();
});
document.getElementById("pin").addEventListener("click", () => move([...pins, valuesOf()]));
document.getElementById("save").addEventListener("click", save);
document.getElementById("back").addEventListener("click", () => {
  setValues(first);
  move();
});
document.querySelector("main").addEventListener("click", ({ target }) => {
  const { show, unpin } = target.dataset;
  if (unpin) move(pins.filter((_, at) => at !== Number(unpin)));
  if (!show) return;
  setValues(pins[show]);
  move();
});
