// A box above each list of settings: rows whose name, default or meaning lacks a word that is typed are hidden.
for (const list of document.querySelectorAll(".stacked")) {
  const box = document.createElement("input");
  box.type = "search";
  box.className = "filter";
  box.placeholder = "Filter the settings: lr, checkpoint save, ...";
  box.setAttribute("aria-label", "Filter the settings");
  list.before(box);
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const head of list.querySelectorAll("h2")) {
      let table = head.nextElementSibling; // Material wraps a table in two boxes
      let found = false;
      for (const row of table.querySelectorAll("tbody tr")) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        found ||= !row.hidden;
      }
      head.hidden = table.hidden = !found;
    }
  });
}
