"""The chapter between messages and the model's text: chat templates, tool calls, reasoning.

From messages to a prompt: `conversation` checks and shapes them, `template` renders the chat
template of the model file, `template_child` keeps the template from doing harm.

From the model's text back to messages: `families` learns from the template how its model writes
calls (`form.Form`) and reasoning. `dialect` makes of these a parser, which turns the text into
`events` however it is cut into pieces, and grammars that force a call or an answer of a certain
form (`lark`).
"""
