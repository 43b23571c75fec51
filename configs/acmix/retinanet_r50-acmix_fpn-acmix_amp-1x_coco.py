_base_ = './retinanet_r50-acmix_fpn-acmix_1x_coco.py'

# float16 with loss scaling, on a GPU
optim_wrapper = dict(type='AmpOptimWrapper')
