// Draw the formulas that arithmatex leaves as \(...\) and \[...\].
document.querySelectorAll(".arithmatex").forEach((element) => {
  const text = element.textContent;
  katex.render(text.slice(2, -2), element, { displayMode: text.startsWith("\\[") });
});
