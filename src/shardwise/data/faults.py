"""What can be wrong with a row: every kind by name, what it means, and what may be done about it."""

from __future__ import annotations

from typing import NamedTuple


class RowFault(Exception):
    """One row is not usable as it stands. `kind` is a key of KINDS; the text names the turn and the value.

    The address is added by whoever read the row: nothing below it needs to know.
    """

    def __init__(self, kind: str, text: str) -> None:
        assert kind in KINDS, kind
        super().__init__(kind, text)  # both, so that it survives pickling
        self.kind, self.text = kind, text

    def __str__(self) -> str:
        return self.text


class Kind(NamedTuple):
    """`usable`: the row could be trained on all the same, so it is kept where the policy says `report`."""

    meaning: str
    usable: bool = False


KINDS = {
    "broken_json": Kind("not valid JSON, or not a JSON object (of a .csv file: not a valid record)"),
    "bad_utf8": Kind("bytes or escapes that are not text"),
    "oversized_row": Kind("one row of more than 16 MiB"),
    "wrong_schema": Kind("no known format fits, or a value has the wrong type"),
    "mixed_schema": Kind("fits another format than the rows before it in its source"),
    "no_messages": Kind("no message, or no assistant turn to learn from"),
    "null_content": Kind("a turn whose content is null or missing"),
    "empty_turn": Kind("a turn with nothing but white space", usable=True),
    "empty_text": Kind("a text with nothing but white space"),
    "unknown_role": Kind("a role that is none of system, developer, user, assistant, tool"),
    "role_order": Kind("roles out of order: an assistant turn before any user turn, a late system turn, "
                       "a tool result that nothing called for"),
    "bad_tools": Kind("tool calls or tool schemas that are not what the format asks for"),
    "truncated_answer": Kind("an answer its source marks as cut off (finish_reason: length)"),
    "prompt_trained": Kind("an answer that begins with its whole prompt, which would be trained as if answered"),
    "template_refused": Kind("the chat template refuses the conversation"),
    "text_lost": Kind("the chat template leaves a turn's text out"),
    "mask_disagreement": Kind("two independent readings of what to supervise differ, or cannot be made certain"),
    "terminator_untrained": Kind("the template ends an answer with no control token, so stopping is never learned",
                                 usable=True),
    "no_supervised": Kind("no token carries loss (no turn that is trained, or none left after truncation)"),
    "too_long": Kind("more than data.max_length tokens (data.on_too_long says what happens)"),
    "marker_text": Kind("text equal to one of the template's control tokens; it is tokenised as ordinary text",
                        usable=True),
    "duplicate": Kind("the same conversation as an earlier row", usable=True),
    "eval_overlap": Kind("an evaluation row that is also in the training data", usable=True),
}
