"""Classify small images with random brightness and noise as augmentation."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

in_place = sys.argv[1] == "bad"
torch.manual_seed(1)

prototypes = torch.randn(10, 1, 16, 16)
labels = torch.randint(10, (512,))
images = prototypes[labels] + 0.4 * torch.randn(512, 1, 16, 16)


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return len(labels)

    def __getitem__(self, i):
        image = images[i] if in_place else images[i].clone()  # a view of the cached tensor, or a copy
        image += 0.9 * torch.randn_like(image)
        image *= 0.8 + 0.4 * torch.rand(())
        if torch.rand(()) < 0.5:
            image[:, :, :] = image.roll(int(torch.randint(-1, 2, ())), -1)
        return image, labels[i]


net = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(16 * 64, 64),
    nn.ReLU(),
    nn.Dropout(0.1),
    nn.Linear(64, 10),
)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(Images(), batch_size=64, shuffle=True)
step = 0
for epoch in range(10):
    for x, y in loader:
        loss = F.cross_entropy(net(x), y, label_smoothing=0.02)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
    print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
net.eval()
test = prototypes[labels] + 0.4 * torch.randn(512, 1, 16, 16)
print("test loss", F.cross_entropy(net(test), labels).item())
