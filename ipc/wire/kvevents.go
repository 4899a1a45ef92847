package wire

import (
	"encoding/binary"
	"math"
)

// The events that vLLM's KV event publisher sends, as msgspec writes vllm.distributed.kv_events
// (0.32): a batch is the array [seconds, events, data-parallel rank], an event a map with its
// class's name as "type". Fields behind those written here have their defaults, and msgspec leaves
// such fields out.

// KVHashes says how events name blocks.
type KVHashes uint8

const (
	// by the last 8 bytes of the digest, a big-endian number: vLLM's default
	KVHashInts  KVHashes = iota
	KVHashBytes          // by the whole digest: with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0
)

// BlockStored says that blocks can be found.
type BlockStored struct {
	Hashes []byte // digests, end to end
	// digest of the block before the first; empty if there is none, or it is not known
	Parent      []byte
	DigestBytes int
	BlockTokens int
	Medium      string
}

// Append writes the event.
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

// BlockRemoved says that blocks cannot be found any more.
type BlockRemoved struct {
	Hashes      []byte
	DigestBytes int
	Medium      string
}

// Append writes the event.
func (e *BlockRemoved) Append(dst []byte, as KVHashes) []byte {
	dst = appendStr(appendStr(appendMap(dst, 4), "type"), "BlockRemoved")
	dst = appendHashes(dst, e.Hashes, e.DigestBytes, as)
	dst = appendStr(appendStr(dst, "medium"), e.Medium)
	return appendStr(appendStr(dst, "locality"), "LOCAL")
}

// AppendAllBlocksCleared writes the event that nothing can be found.
func AppendAllBlocksCleared(dst []byte) []byte {
	return appendStr(appendStr(appendMap(dst, 1), "type"), "AllBlocksCleared")
}

// AppendKVEventBatch writes a batch of events that are written already, end to end.
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
