package wire

import (
	"encoding/binary"
	"math"
)

// The events of vLLM's KV event publisher, encoded as msgspec encodes vllm.distributed.kv_events
// (0.32). A batch is the array [seconds, events, data-parallel rank]. An event is a map with its
// class's name as "type". Later fields of the classes have their defaults, and msgspec omits fields
// that do.

// KVHashes is how events name blocks.
type KVHashes uint8

const (
	// KVHashInts names a block by the last 8 bytes of its digest, a big-endian number. It is
	// vLLM's default.
	KVHashInts KVHashes = iota
	// KVHashBytes names a block by its whole digest, as vLLM does with
	// VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0.
	KVHashBytes
)

// BlockStored reports that blocks can be found.
type BlockStored struct {
	Hashes      []byte // packed digests
	Parent      []byte // digest of the block before the first; empty if none or not known
	DigestBytes int
	BlockTokens int
	Medium      string
}

// Append appends the encoded event to dst.
func (e *BlockStored) Append(dst []byte, as KVHashes) []byte {
	dst = appendStr(appendStr(appendMap(dst, 9), "type"), "BlockStored")
	dst = appendHashes(dst, e.Hashes, e.DigestBytes, as)
	dst = appendStr(dst, "parent_block_hash")
	if len(e.Parent) > 0 {
		dst = appendHash(dst, e.Parent, as)
	} else {
		dst = append(dst, nilByte)
	}
	dst = appendArray(appendStr(dst, "token_ids"), 0)
	dst = appendUint(appendStr(dst, "block_size"), uint64(e.BlockTokens))
	dst = append(appendStr(dst, "lora_id"), nilByte)
	dst = appendStr(appendStr(dst, "medium"), e.Medium)
	dst = append(appendStr(dst, "lora_name"), nilByte)
	return appendStr(appendStr(dst, "locality"), "LOCAL")
}

// BlockRemoved reports that blocks cannot be found any more.
type BlockRemoved struct {
	Hashes      []byte // packed digests
	DigestBytes int
	Medium      string
}

// Append appends the encoded event to dst.
func (e *BlockRemoved) Append(dst []byte, as KVHashes) []byte {
	dst = appendStr(appendStr(appendMap(dst, 4), "type"), "BlockRemoved")
	dst = appendHashes(dst, e.Hashes, e.DigestBytes, as)
	dst = appendStr(appendStr(dst, "medium"), e.Medium)
	return appendStr(appendStr(dst, "locality"), "LOCAL")
}

// AppendAllBlocksCleared appends the event that no block can be found any more.
func AppendAllBlocksCleared(dst []byte) []byte {
	return appendStr(appendStr(appendMap(dst, 1), "type"), "AllBlocksCleared")
}

// AppendKVEventBatch appends a batch of events. encoded has them encoded, one after the other.
func AppendKVEventBatch(dst []byte, seconds float64, events int, encoded []byte,
	rank uint32) []byte {
	dst = binary.BigEndian.AppendUint64(append(appendArray(dst, 3), 0xcb),
		math.Float64bits(seconds))
	dst = append(appendArray(dst, events), encoded...)
	return appendUint(dst, uint64(rank))
}

const nilByte = 0xc0

func appendHashes(dst, hashes []byte, digest int, as KVHashes) []byte {
	n := len(hashes) / digest
	dst = appendArray(appendStr(dst, "block_hashes"), n)
	for i := range n {
		dst = appendHash(dst, hashes[i*digest:(i+1)*digest], as)
	}
	return dst
}

func appendHash(dst, d []byte, as KVHashes) []byte {
	if as == KVHashBytes {
		return appendBin(dst, d)
	}
	return appendUint(dst, binary.BigEndian.Uint64(d[len(d)-8:]))
}
