package unshared

import (
	"slices"
	"strings"
	"testing"

	"lookaside/ipc/wire"
)

// space is what a worker declares, with some of it changed. An empty value leaves a field out.
func space(changes map[string]string) *Space {
	fields := map[string]string{
		"model": "m", "revision": "None", "weights": "files:1", "dtype": "torch.bfloat16",
		"kv_dtype": "auto", "tp": "2", "tp_shard": "0/2", "pp_rank": "0",
		"hash": "sha256_cbor", "none_hash": strings.Repeat("ab", 32), "hash_keys": "1",
		"vllm": "0.32", "quantization": "None", "page": "p", "isa": "amx", "shapes": "s",
	}
	for k, v := range changes {
		if v == "" {
			delete(fields, k)
		} else {
			fields[k] = v
		}
	}
	s := &Space{PageTokens: 128, PageBytes: 1 << 20, PagesPerChunk: 2, DigestBytes: 32}
	for k, v := range fields {
		s.Fields = append(s.Fields, wire.Field{Key: k, Value: v})
	}
	slices.SortFunc(s.Fields, func(a, b wire.Field) int { return strings.Compare(a.Key, b.Key) })
	return s
}

func sized(s *Space, tokens, bytes, pages int64) *Space {
	s.PageTokens, s.PageBytes, s.PagesPerChunk = tokens, bytes, pages
	return s
}

func TestAccidents(t *testing.T) {
	changed := func(pairs ...string) *Space {
		m := map[string]string{}
		for i := 0; i < len(pairs); i += 2 {
			m[pairs[i]] = pairs[i+1]
		}
		return space(m)
	}
	for _, c := range []struct {
		name   string
		other  *Space
		causes []string // fields; none: not by accident
		say    string
	}{
		{"nothing", changed(), nil, ""},
		{"seed", changed("none_hash", strings.Repeat("cd", 32)), []string{"none_hash"},
			"PYTHONHASHSEED"},
		{"algorithm", changed("hash", "sha256", "none_hash", "x", "hash_keys", "2"),
			[]string{"hash"}, "--prefix-caching-hash-algo"},
		{"python", changed("hash_keys", "2"), []string{"hash_keys"}, "sha256_cbor"},
		{"release", changed("vllm", "0.31", "hash_keys", "2"), []string{"vllm"}, "same release"},
		{"block size", sized(changed("page", "q", "shapes", "t"), 64, 1<<19, 4),
			[]string{"page_tokens"}, "--block-size"},
		{"chunk", sized(changed(), 128, 1<<20, 4), []string{"pages_per_chunk"},
			"lookaside.chunk_tokens"},
		{"dtype", sized(changed("dtype", "torch.float32", "page", "q", "isa", "vec"), 128, 2<<20,
			2), []string{"dtype"}, "--dtype"},
		{"kv dtype", sized(changed("kv_dtype", "fp8", "page", "q"), 128, 1<<19, 2),
			[]string{"kv_dtype"}, "--kv-cache-dtype"},
		{"revision", changed("revision", "v2", "weights", "commit:2"), []string{"revision"},
			"--revision"},
		{"files", changed("weights", "files:2"), []string{"weights"}, "rsync -t"},
		{"two at once", changed("none_hash", "x", "dtype", "torch.float16"),
			[]string{"none_hash", "dtype"}, "Also"},
		{"another model", changed("model", "n"), nil, ""},
		{"another model, and seed", changed("model", "n", "none_hash", "x"), nil, ""},
		{"another rank", changed("tp_shard", "1/2"), nil, ""},
		{"another rank, and seed", changed("tp_shard", "1/2", "none_hash", "x"), nil, ""},
		{"a field more", changed("lossy", "int4"), nil, ""},
		{"a field less", changed("quantization", ""), nil, ""},
		{"another layout alone", changed("isa", "vec"), nil, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			ours := space(nil)
			there, back := Accident(Differences(ours, c.other)),
				Accident(Differences(c.other, ours))
			var fields []string
			for i := range there {
				fields = append(fields, there[i].Field)
				if there[i].Ours != back[i].Theirs || there[i].Theirs != back[i].Ours ||
					there[i].Ours == there[i].Theirs {
					t.Errorf("%+v, and from the other side %+v", there[i], back[i])
				}
			}
			if !slices.Equal(fields, c.causes) {
				t.Fatalf("causes %v, want %v", fields, c.causes)
			}
			if text := Text(there); !strings.Contains(text, c.say) || len(text) > 600 {
				t.Errorf("%q does not name %q", text, c.say)
			}
		})
	}
	if d := Differences(space(nil), &Space{PageTokens: 64}); len(d) != 1 ||
		d[0] != (Difference{"page_tokens", "128", "64"}) {
		t.Errorf("of a space of which little is known: %+v", d)
	}
	long := Cause{Difference: Difference{"weights", strings.Repeat("ä", 300),
		strings.Repeat("b", 300)}, What: "w", Fix: "f"}
	if len(long.String()) > 200 {
		t.Errorf("%d bytes", len(long.String()))
	}
}
