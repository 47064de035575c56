"""The sets: what there is, how to get it, how ranks divide it, and how one larger than memory is read."""

from labkit.data.commands import data_command as data_command
from labkit.data.downloading import Patience as Patience
from labkit.data.errors import DataError as DataError
from labkit.data.fetching import fetch as fetch
from labkit.data.fetching import path as path
from labkit.data.fetching import status as status
from labkit.data.fetching import verify as verify
from labkit.data.image_folders import FolderImages as FolderImages
from labkit.data.image_sets import ImageSet as ImageSet
from labkit.data.image_sets import images as images
from labkit.data.registry import REGISTRY as REGISTRY
from labkit.data.registry import RegistryEntry as RegistryEntry
from labkit.data.registry import RemoteFile as RemoteFile
from labkit.data.registry import lookup as lookup
from labkit.data.sampler import DistributedSampler as DistributedSampler
from labkit.data.sampler import GlobalBatches as GlobalBatches
from labkit.data.shard_loader import ShardLoader as ShardLoader
from labkit.data.shards import write_shards as write_shards
from labkit.data.stream import ShardStream as ShardStream
from labkit.data.text_sets import TextSet as TextSet
from labkit.data.text_sets import text as text
from labkit.data.token_blocks import TokenBlocks as TokenBlocks
from labkit.data.token_blocks import token_stream as token_stream
from labkit.data.tokens import decode as decode
from labkit.data.tokens import encode as encode
from labkit.data.tokens import load_tokenizer as load_tokenizer
