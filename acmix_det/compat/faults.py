"""Faults that no program can mend: a full disk, a broken file, data that do not fit the config."""
import errno
import sys
from contextlib import contextmanager

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MAKE_ROOM = 'Make room; --resume then continues from the last complete checkpoint'


class FaultError(RuntimeError):
    """Names the file or argument at fault and the way out; its message needs no traceback."""


class MissingFileError(FaultError, FileNotFoundError):
    """A file that the data need is not there."""


@contextmanager
def end_with_message():
    """End the script with exit status 1 and one message, without a traceback.

    So it does on a FaultError, on a full disk, and on a folder that cannot be made or written to.
    """
    try:
        yield
    except FaultError as error:
        # A worker of a data loader puts its own traceback before the message.
        sys.exit('error: ' + str(error).rpartition(f'{FaultError.__name__}: ')[2].rstrip())
    except OSError as error:
        if error.errno in FULL:
            sys.exit(f'error: {error.filename or "a file of the work dir"} was not written: {error.strerror}. {MAKE_ROOM}')
        if isinstance(error, (FileExistsError, NotADirectoryError, PermissionError)) and error.filename is not None:
            sys.exit(f'error: {error.filename}: {error.strerror}')
        raise


def is_local(path, backend_args=None):
    """Say whether mmengine looks for a file on this machine.

    Args:
        path (str): Path or address of the file.
        backend_args (dict, optional): As in `mmengine.fileio.get`. Defaults to None.
    """
    return '://' not in path and (backend_args or {}).get('backend', 'local') == 'local'
