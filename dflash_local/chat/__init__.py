"""The chapter between messages and the model's text: chat templates, tool calls, reasoning.

From messages to a prompt: `conversation` checks and shapes them, `template` renders the chat
template of the model file, `template_child` keeps the template from doing harm.

From the model's text back to messages: a dialect (`dialect.Dialect`) is how a family of models
writes reasoning and tool calls. Its parser turns the text into `events`, however it is cut into
pieces; its grammars force a call or an answer of a certain form. Each dialect has a file in
`dialects`; what they share is in `parsing`, `reasoning` and `lark`.

To add a dialect, write its file in `dialects` and name its class in `families.DIALECTS`.
"""
