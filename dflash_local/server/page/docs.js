/** Puts this server's own address into the examples of docs.html. */

const USUAL = "http://127.0.0.1:8080";

for (const code of document.querySelectorAll("code"))
  for (const node of code.childNodes)
    if (node.nodeType === Node.TEXT_NODE)
      node.data = node.data.replaceAll(USUAL, location.origin);
