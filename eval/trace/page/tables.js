// Tables that can be sorted by any column.
"use strict";

/** Columns: `head`, `cell(item)`, `key(item)` to sort by, `left`. `sorted`: the column to begin with, largest first. */
function sortableTable(table, columns, items, sorted) {
  const body = el("tbody");
  let [by, descending] = [sorted, true];
  let wanted = () => true;
  const heads = columns.map((column, index) =>
    el(
      "th",
      { scope: "col", className: column.left ? "left" : "" },
      el("button", { type: "button", onclick: () => sort(index) }, column.head),
    ),
  );
  table.replaceChildren(el("thead", {}, el("tr", {}, ...heads)), body);

  function sort(index) {
    descending = index === by ? !descending : !columns[index].left;
    by = index;
    fill();
  }

  function fill() {
    heads.forEach((head, index) => {
      if (index === by) head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    const { key } = columns[by];
    const order = items.filter(wanted).sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0));
    if (descending) order.reverse();
    body.replaceChildren(
      ...order.map((item) =>
        el(
          "tr",
          {},
          ...columns.map((column, index) =>
            el(
              index ? "td" : "th",
              { className: (column.left ? "left " : "") + (column.className ?? "") },
              column.cell(item),
            ),
          ),
        ),
      ),
    );
  }

  fill();
  return (filter) => {
    wanted = filter;
    fill();
  };
}
