"""Refuse, and write down, what would leave this machine.

Python imports it at start where this folder is on PYTHONPATH. Child processes
inherit it. Each connection, lookup and download is a line of the file that
NETWORK_ATTEMPTS names.
"""
import os
import socket
import sys

LOCAL = ('localhost', '127.0.0.1', '::1', '0.0.0.0', '::', '', None)
LOOKUPS = ('socket.getaddrinfo', 'socket.gethostbyname',
           'socket.gethostbyaddr')
SENDS = ('socket.connect', 'socket.sendto', 'socket.sendmsg')
DOWNLOADERS = ('curl', 'git-remote-https', 'pip', 'scp', 'ssh', 'wget')


def target(event, args):
    """Where an event leads to; None if it stays on this machine."""
    if event in LOOKUPS:
        host = args[0]
    elif event in SENDS:
        if args[0].family not in (socket.AF_INET, socket.AF_INET6):
            return None
        host = args[1] and args[1][0]
    elif event == 'urllib.Request':
        return None if args[0].startswith(('file:', 'data:')) else args[0]
    elif event == 'subprocess.Popen':
        name = os.path.basename(os.fsdecode(args[0] or args[1][0]))
        return name if name in DOWNLOADERS else None
    else:
        return None
    host = host.decode() if isinstance(host, bytes) else host
    return None if host in (*LOCAL, socket.gethostname()) else host


def refuse(event, args):
    where = target(event, args)
    if where is not None:
        with open(os.environ['NETWORK_ATTEMPTS'], 'a') as file:
            file.write(f'{event} {where}\n')
        raise PermissionError(f'{event} {where} is refused in this test')


sys.addaudithook(refuse)
