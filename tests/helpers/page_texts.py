"""Whether everything on a page can be read: no text overlaps another or is cut off, and the page is not too wide.

What lives here: measuring a page that is open in a browser. What must not: which page, and what it should say (tests).
"""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page

#: A box is a line of one text node: as high as its font, because the boxes of a browser contain the gap between lines.
#: What a scrolling or clipping ancestor hides does not count. Hidden texts have no boxes.
_FAULTS = """() => {
  const boxes = [], faults = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode()); ) {
    const text = node.textContent.trim(), parent = node.parentElement;
    if (!text || !parent.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
    const size = parseFloat(getComputedStyle(parent).fontSize);
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const line of range.getClientRects()) {
      const middle = (line.top + line.bottom) / 2, half = Math.min(line.height, size) / 2;
      const box = { text, node, left: line.left, right: line.right, top: middle - half, bottom: middle + half };
      for (let above = parent; above; above = above.parentElement) {
        const style = getComputedStyle(above), edge = above.getBoundingClientRect();
        if (style.overflowX !== "visible") {
          if (style.overflowX === "hidden" && box.right > edge.right + 1) faults.push(`cut off: ${text}`);
          box.left = Math.max(box.left, edge.left);
          box.right = Math.min(box.right, edge.right);
        }
        if (style.overflowY !== "visible") {
          box.top = Math.max(box.top, edge.top);
          box.bottom = Math.min(box.bottom, edge.bottom);
        }
      }
      if (box.right - box.left > 1 && box.bottom - box.top > 1) boxes.push(box);
    }
  }
  boxes.forEach((one, i) => {
    for (const other of boxes.slice(i + 1)) {
      if (one.node === other.node) continue;
      const wide = Math.min(one.right, other.right) - Math.max(one.left, other.left);
      const high = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
      if (wide > 1 && high > 1) faults.push(`overlap: ${one.text} | ${other.text}`);
    }
  });
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) faults.push(`the page is ${root.scrollWidth} wide, of ${root.clientWidth}`);
  return { faults: [...new Set(faults)], texts: boxes.length };
}"""


def unreadable(page: Page, texts_min: int) -> list[str]:
    """What cannot be read on a page as it is shown now. texts_min: fewer texts mean that the page is not complete."""
    found: dict[str, Any] = page.evaluate(_FAULTS)
    assert found["texts"] >= texts_min, found
    faults: list[str] = found["faults"]
    return faults
