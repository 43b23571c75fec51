_base_ = './san10_8xb32-100e_in1k.py'

model = dict(backbone=dict(depth=19))
