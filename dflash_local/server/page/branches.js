/** What a chat was before a question was changed or an answer written again, to step through.
 *
 * `chat.branches[i]` are the ways in which a chat goes on from its message `i`: `tails` has the
 * messages of each, with the branches in them, and null for the one that is shown, number `at`.
 */

/** Begin another way at message `i`, in place of it and of all after it. */
export function fork(chat, i) {
  const point = (chat.branches[i] ??= { at: 0, tails: [null] });
  const tail = cut(chat, i);
  if (!tail.messages.length && point.tails.length > 1) return; // nothing came of the last one
  point.tails[point.at] = tail;
  point.at = point.tails.push(null) - 1;
}

/** Show the way number `to` from message `i` on. */
export function step(chat, i, to) {
  const point = chat.branches[i];
  const tail = cut(chat, i);
  if (tail.messages.length) point.tails[point.at] = tail;
  else {
    point.tails.splice(point.at, 1);
    if (to > point.at) to--;
  }
  const { messages, branches } = point.tails[to];
  point.tails[to] = null;
  point.at = to;
  chat.messages.push(...messages);
  Object.assign(chat.branches, branches);
}

function cut(chat, i) {
  const branches = {};
  for (const at of Object.keys(chat.branches).map(Number).filter((at) => at > i)) {
    branches[at] = chat.branches[at];
    delete chat.branches[at];
  }
  return { messages: chat.messages.splice(i), branches };
}
