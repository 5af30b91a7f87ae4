// Theme, tips of bars, copied commands, and what paper needs.

const root = document.documentElement, themes = document.querySelectorAll("[data-sets]");

function setTheme(name) {
  if (name === "auto") delete root.dataset.theme;
  else root.dataset.theme = name;
  for (const button of themes) button.setAttribute("aria-pressed", String(button.dataset.sets === name));
  dispatchEvent(new Event("recolour"));
}

for (const button of themes) button.addEventListener("click", () => setTheme(button.dataset.sets));
setTheme("auto");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("recolour")));

document.addEventListener("pointermove", (event) => {
  const piece = event.target.closest?.("[data-tip]");
  if (piece) showTip(piece.dataset.tip, event.clientX, event.clientY);
  else if (!event.target.closest?.(".canvas")) hideTip();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
});

for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    const shown = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(shown.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(shown); // where a page may not write, people can copy what is selected
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}

// Paper is white and cannot unfold.
let before = [];
addEventListener("beforeprint", () => {
  before = [root.dataset.theme ?? "auto", ...document.querySelectorAll("details:not([open])")];
  before.slice(1).forEach((one) => { one.open = true; });
  setTheme("light");
});
addEventListener("afterprint", () => {
  const [theme, ...folded] = before;
  folded.forEach((one) => { one.open = false; });
  setTheme(theme);
});
