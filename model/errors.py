"""The two kinds of failure that a user can cause: one line each, with the cause and the way out."""


class UserError(Exception):
    """Something went wrong at run time; the program prints the message alone and exits with 1."""

    exit_code = 1


class UsageError(UserError):
    """The request itself cannot be served; the program prints the message alone and exits with 2."""

    exit_code = 2
