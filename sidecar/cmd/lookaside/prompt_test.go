package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"lookaside/ipc/wire"
	"lookaside/sidecar/admin"
	"lookaside/sidecar/vllm"
)

// tokenizer is a vLLM server that makes of each byte of a prompt a token.
func tokenizer(t *testing.T) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		var body struct {
			Prompt   string
			Messages []struct{ Content string }
		}
		if err := json.Unmarshal(b, &body); err != nil || r.URL.Path != "/tokenize" {
			http.Error(w, "no", http.StatusNotFound)
			return
		}
		for _, m := range body.Messages {
			body.Prompt += m.Content
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"tokens": tokensOf(body.Prompt)})
	}))
	t.Cleanup(server.Close)
	return server.URL
}

func tokensOf(text string) []int {
	var tokens []int
	for _, c := range []byte(text) {
		tokens = append(tokens, int(c))
	}
	return tokens
}

func fieldsOf(m map[string]string) []wire.Field {
	var fields []wire.Field
	for _, key := range slices.Sorted(maps.Keys(m)) {
		fields = append(fields, wire.Field{Key: key, Value: m[key]})
	}
	return fields
}

// Commands take a prompt, a chat or tokens, and find what was stored under the names that vLLM has
// for its pages.
func TestPrompts(t *testing.T) {
	near := t.TempDir()
	s := serveProcess(t, "--disk", near+":8M:slab=1M:name=near:load_timeout=30s",
		"--lookup-deadline=30s", "--cascade-partial-delay=10ms", "--sessions-share=1")
	c := commander{t, s.dir}
	// 200 tokens: 12 pages of 16, and 8 tokens
	text := strings.Repeat("You are a helpful thing. ", 8)
	url := tokenizer(t)
	by := []string{"--prompt=" + text, "--vllm=" + url}

	c.fails(append([]string{"lookup"}, by...), "no worker of rank 0 is connected")
	c.fails(append([]string{"prefetch"}, by...), "no space is open")

	fields := map[string]string{"hash": "sha256_cbor", "none_hash": strings.Repeat("5a", 32),
		"hash_keys": "unknown", "model": "m", "dtype": "float32", "tp_shard": "0/1", "tp": "1"}
	h := hello(wire.RoleWorker)
	h.Fields = fieldsOf(fields)
	w := s.workerOf(h)
	scheme, err := vllm.SchemeOf(fields, 16)
	if err != nil {
		t.Fatal(err)
	}
	var tokens []uint32
	for _, n := range tokensOf(text) {
		tokens = append(tokens, uint32(n))
	}
	names, err := scheme.Pages(tokens, "")
	if err != nil || len(names) != 12 {
		t.Fatal(names, err)
	}
	packed, _, err := admin.ParseHashes(names)
	if err != nil {
		t.Fatal(err)
	}
	storeThese(t, w, packed)
	c.untilStored(12)

	lookup := []string{"lookup", "--timeout=30s"}
	with := func(command []string, more ...string) []string {
		return append(slices.Clone(command),
			more...)
	}
	c.says(with(lookup, by...), nil, "hit: 12 of 12 pages, 192 tokens")
	c.says(with(lookup, "--prompt="+text[:100], "--vllm="+url), nil, "hit: 6 of 6 pages, 96 tokens")
	c.says(with(lookup, "--prompt="+text[:100]+strings.ToUpper(text), "--vllm="+url), nil,
		"hit: 6 of 18 pages")
	c.says(with(lookup, append(by, "--first-page=4")...), nil, "hit: 8 of 8 pages")
	c.fails(with(lookup, append(by, "--first-page=12")...), "12 whole pages")
	c.fails(with(lookup, "--prompt=short", "--vllm="+url), "5 tokens")
	c.fails(with(lookup, "--prompt="+text), "--vllm")
	c.fails(with(lookup, append(by, "--cache-salt=x")...), "cache_salt")

	file := func(content string) string {
		path := filepath.Join(t.TempDir(), "input")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	chat, err := json.Marshal([]map[string]string{{"role": "system", "content": text[:90]},
		{"role": "user", "content": text[90:]}})
	if err != nil {
		t.Fatal(err)
	}
	c.says(with(lookup, "--prompt-file="+file(text), "--vllm="+url), nil, "hit: 12 of 12 pages")
	c.says(with(lookup, "--messages="+file(string(chat)), "--vllm="+url), nil,
		"hit: 12 of 12 pages")
	words := strings.Trim(fmt.Sprint(tokensOf(text)[:40]), "[]")
	c.says(with(lookup, "--tokens="+file(words)), nil, "hit: 2 of 2 pages")
	list, err := json.Marshal(tokensOf(text))
	if err != nil {
		t.Fatal(err)
	}
	c.says(with(lookup, "--tokens="+file(string(list))), nil, "hit: 12 of 12 pages")

	c.says(append([]string{"pin", "--label=system"}, by...), nil, "12 of 12")
	c.says([]string{"unpin", "--all"}, nil, "unpinned: 1")
	c.says(append([]string{"move", "--from=arena", "--to=near"}, by...), nil,
		"in near: 12 of 12 pages")
	c.says(append([]string{"prefetch"}, by...), nil, "in the arena: 12 of 12 pages")

	// The beginning stays, then nothing does.
	c.says(append([]string{"clear", "--yes", "--first-page=8"}, by...), nil, "arena: 1 chunks",
		"near: cleared")
	c.says(with(lookup, by...), nil, "hit: 8 of 12 pages")
	c.says(append([]string{"clear", "--yes", "--tier=arena"}, by...), nil, "arena: 2 chunks")
	c.says(append([]string{"prefetch"}, by...), nil, "in the arena: 8 of 12 pages")
	c.says(append([]string{"clear", "--yes"}, by...), nil, "arena: 2 chunks", "near: cleared")
	c.says(append([]string{"prefetch"}, by...), nil, "in the arena: 0 of 12 pages")

	// With a second space it must be said which.
	other := maps.Clone(fields)
	other["model"] = "other"
	h = hello(wire.RoleWorker)
	h.EngineID, h.Fields = "engine2", fieldsOf(other)
	s.workerOf(h)
	c.fails(with(lookup, by...), "--engine-id", "engine2")
	c.fails(append([]string{"prefetch"}, by...), "--space", "(other, float32, rank 0/1 of 1)")
	c.says(with(lookup, append(by, "--engine-id=engine2")...), nil, "hit: 0 of 12 pages")
}
