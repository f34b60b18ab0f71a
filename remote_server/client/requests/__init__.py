"""Small requests: the messages of each, the mailbox that they come from, and their channel."""
