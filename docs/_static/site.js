// What the theme leaves out for keyboards and screen readers.
function complete() {
  // Captions of lists of pages are headings of a level.
  for (const caption of document.querySelectorAll('p.caption[role="heading"]')) caption.setAttribute("aria-level", "3");

  // Parameters of a long signature are lines, not definitions without their terms.
  for (const list of document.querySelectorAll(".sig dl")) {
    const lines = document.createElement("div");
    lines.className = "parameters";
    for (const each of [...list.children]) {
      const line = document.createElement("div");
      line.append(...each.childNodes);
      lines.append(line);
    }
    list.replaceWith(lines);
  }

  for (const each of document.querySelectorAll('article p > img[src$=".svg"]')) each.parentElement.classList.add("drawing");

  // Each side of the page has a name of its own.
  document.querySelector("aside.sidebar-drawer")?.setAttribute("aria-label", "All pages");
  document.querySelector("aside.toc-drawer")?.setAttribute("aria-label", "This page");
}

// Code, tables and drawings that scroll sideways can be scrolled by the arrow keys, too; on wide screens they do not scroll.
function focusable() {
  for (const each of document.querySelectorAll("div.highlight pre, .table-wrapper, .drawing")) {
    if (each.scrollWidth > each.clientWidth) each.tabIndex = 0;
    else each.removeAttribute("tabindex");
  }
}

document.addEventListener("DOMContentLoaded", () => {
  complete();
  focusable();
});
window.addEventListener("load", focusable);
window.addEventListener("resize", focusable);
