"use strict";
(() => {
  // The heads of tables are buttons that sort: one way, the other way, and back to the order of the page.
  const valueOf = cell => {
    const text = cell.dataset.value === undefined ? cell.textContent.trim() : cell.dataset.value;
    return text === "" || Number.isNaN(Number(text)) ? text : Number(text);
  };
  const compared = (a, b, sign) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    if (typeof a === "number" && typeof b === "number") return sign * (a - b);
    return sign * String(a).localeCompare(String(b), "en", { numeric: true });
  };
  // Rows as a tree: below a row are its detail, which stays with it, and the rows inside of it.
  const treeOf = rows => {
    const root = { depth: -1, own: [], inside: [] }, path = [root];
    rows.forEach(row => {
      if (row.classList.contains("detail")) { path[path.length - 1].own.push(row); return; }
      const node = { depth: Number(row.dataset.depth || 0), own: [row], inside: [] };
      while (path[path.length - 1].depth >= node.depth) path.pop();
      path[path.length - 1].inside.push(node);
      path.push(node);
    });
    return root;
  };
  const place = (node, column, sign, into) => {
    into.push(...node.own);
    const inside = node.inside.map(each => [each, sign === 0 ? 0 : valueOf(each.own[0].cells[column])]);
    if (sign !== 0) inside.sort((a, b) => compared(a[1], b[1], sign));
    inside.forEach(([each]) => place(each, column, sign, into));
  };
  document.querySelectorAll("table").forEach(table => {
    const body = table.tBodies[0], rows = [...body.rows];
    if (table.tHead === null || table.tBodies.length !== 1 || rows.length < 2) return;
    const tree = treeOf(rows), heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if (head.textContent.trim() === "") return;
      const ways = head.classList.contains("n") ? ["none", "descending", "ascending"] : ["none", "ascending", "descending"];
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...head.childNodes);
      head.append(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const way = ways[(ways.indexOf(head.getAttribute("aria-sort")) + 1) % 3], placed = [];
        heads.forEach(each => { if (each.hasAttribute("aria-sort")) each.setAttribute("aria-sort", "none"); });
        head.setAttribute("aria-sort", way);
        place(tree, column, { none: 0, ascending: 1, descending: -1 }[way], placed);
        body.append(...placed);
        table.dispatchEvent(new Event("sorted"));
      });
    });
  });
})();
