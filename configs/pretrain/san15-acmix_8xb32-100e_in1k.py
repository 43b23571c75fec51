_base_ = './san15_8xb32-100e_in1k.py'

model = dict(backbone=dict(type='mmdet.ACmixSAN'))
