/** Elements, made in one call. */

export function make(name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.textContent = text;
  return element;
}

/** A button; `label` is its name where its text alone does not tell enough. */
export function button(text, action, label) {
  const element = make("button", "", text);
  element.type = "button";
  if (label) element.setAttribute("aria-label", label);
  element.addEventListener("click", action);
  return element;
}
