// Puts newer pages of a live report in the place of this one. The view stays, and so do open details and the order of tables.

const POLL_MS = 2000;
const status = make('p', {id: 'live', role: 'status'}, document.body, 'live');

async function ask(path) {
  const answer = await fetch(path, {cache: 'no-store'});
  if (!answer.ok) throw new Error(String(answer.status));
  return answer.text();
}

function replacePage(text) {
  const next = document.adoptNode(new DOMParser().parseFromString(text, 'text/html').querySelector('main'));
  const main = document.querySelector('main'), open = [...main.querySelectorAll('details')].map(one => one.open);
  const orders = [...main.querySelectorAll('table')].map(table => [...table.tHead.rows[0].cells].map(head => head.getAttribute('aria-sort')));
  main.replaceWith(next);
  next.querySelectorAll('details').forEach((one, i) => { one.open = open[i] ?? one.open; });
  start();
  next.querySelectorAll('table').forEach((table, i) => {
    const column = orders[i]?.findIndex(Boolean) ?? -1, head = table.tHead.rows[0].cells[column];
    head?.click();
    if (orders[i]?.[column] === 'descending') head?.click();
  });
}

async function followRuns() {
  try {
    const [version, problem] = (await ask('version')).split('\n');
    if (version !== document.querySelector('main').dataset.version && !document.querySelector('.chosen')) replacePage(await ask('.'));
    status.textContent = problem || `live · ${new Date().toLocaleTimeString()}`;
  } catch {
    status.textContent = 'maxlm report --live has ended or cannot be reached; this is its last page';
  }
  setTimeout(followRuns, POLL_MS);
}

followRuns();
