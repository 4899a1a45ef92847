package vllm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"
)

// The names that vLLM's own hasher gives, with every algorithm, length of block, width of token and
// salt.
func TestNamesAreVLLMs(t *testing.T) {
	b, err := os.ReadFile("testdata/names.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden []struct {
		Fields     map[string]string `json:"fields"`
		PageTokens int               `json:"page_tokens"`
		Tokens     []uint32          `json:"tokens"`
		CacheSalt  string            `json:"cache_salt"`
		Names      []string          `json:"names"`
	}
	if err := json.Unmarshal(b, &golden); err != nil {
		t.Fatal(err)
	}
	algorithms := map[string]int{}
	for _, g := range golden {
		algorithms[g.Fields["hash"]]++
		s, err := SchemeOf(g.Fields, g.PageTokens)
		if err != nil {
			t.Fatal(err)
		}
		got, err := s.Pages(g.Tokens, g.CacheSalt)
		if err != nil || !slices.Equal(got, g.Names) {
			t.Errorf("%v, pages of %d tokens, salt %.8q: %v, %v\nwant %v", g.Fields, g.PageTokens,
				g.CacheSalt, err, got, g.Names)
		}
	}
	if len(algorithms) != 4 {
		t.Errorf("%v", algorithms)
	}
}

// Before 0.31 a salt stood in the hash by itself.
func TestEarlierSalts(t *testing.T) {
	declared := sha256.Sum256([]byte("('name', 'salt')"))
	fields := map[string]string{"hash": "sha256_cbor", "none_hash": strings.Repeat("00", 32),
		"hash_keys": hex.EncodeToString(declared[:16])}
	tokens := []uint32{1, 2, 3, 4}
	s, err := SchemeOf(fields, 4)
	if err != nil {
		t.Fatal(err)
	}
	got, err := s.Pages(tokens, "s")
	// [32 zero bytes, [1, 2, 3, 4], ["s"]]
	want := sha256.Sum256([]byte("\x83\x58\x20" + strings.Repeat("\x00", 32) +
		"\x84\x01\x02\x03\x04\x81\x61s"))
	if err != nil || len(got) != 1 || got[0] != hex.EncodeToString(want[:]) {
		t.Errorf("%v, %v", got, err)
	}
	fields["hash_keys"] = "of another vLLM"
	if s, err = SchemeOf(fields, 4); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Pages(tokens, "s"); err == nil || !strings.Contains(err.Error(), "cache_salt") {
		t.Errorf("a form that is not known: %v", err)
	}
	if _, err := s.Pages(tokens, ""); err != nil {
		t.Errorf("without a salt the form does not matter: %v", err)
	}
}

func TestWhatCannotBeNamed(t *testing.T) {
	ok := map[string]string{"hash": "sha256", "none_hash": "00", "hash_keys": ""}
	with := func(key, value string) map[string]string {
		m := map[string]string{key: value}
		for k, v := range ok {
			if k != key {
				m[k] = v
			}
		}
		return m
	}
	for _, c := range []struct {
		fields map[string]string
		words  string
	}{
		{map[string]string{}, "no field hash"},
		{with("hash", "blake9"), `"blake9", which is not known here`},
		{with("none_hash", "engine:17"), "PYTHONHASHSEED"},
		{with("hash_tokens", "7"), "blocks of"},
	} {
		if _, err := SchemeOf(c.fields, 16); err == nil || !strings.Contains(err.Error(), c.words) {
			t.Errorf("%v: %v", c.fields, err)
		}
	}
	s, err := SchemeOf(ok, 16)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Pages(make([]uint32, 15), ""); err == nil ||
		!strings.Contains(err.Error(), "15 tokens") {
		t.Errorf("a short prompt: %v", err)
	}
	long, err := SchemeOf(ok, 40_000)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := long.Pages(make([]uint32, 40_000), ""); err == nil ||
		!strings.Contains(err.Error(), "sha256_cbor") {
		t.Errorf("a long block: %v", err)
	}
}

func TestParseTokens(t *testing.T) {
	for text, want := range map[string][]uint32{
		"[1, 2,3]": {1, 2, 3}, " 1 2\n3,4\t5": {1, 2, 3, 4, 5}, "": nil, "[]": {},
		"2147483647": {1<<31 - 1},
	} {
		got, err := ParseTokens(text)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"[1", "[-1]", "1 x", "-1", "2147483648", `["a"]`} {
		if got, err := ParseTokens(text); err == nil {
			t.Errorf("%q: %v", text, got)
		}
	}
}

func TestTokenize(t *testing.T) {
	var got, key string
	status, answer := 200, `{"count": 3, "tokens": [5, 6, 7]}`
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got, key = r.URL.Path+" "+string(b), r.Header.Get("Authorization")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, answer)
	}))
	defer server.Close()
	s := Server{URL: server.URL + "/", Key: "k"}
	tokens, err := s.Tokenize(context.Background(), Text{Prompt: "a b", Model: "m"})
	if err != nil || !slices.Equal(tokens, []uint32{5, 6, 7}) ||
		got != `/tokenize {"model":"m","prompt":"a b"}` || key != "Bearer k" {
		t.Errorf("%v, %v, %s, %s", tokens, err, got, key)
	}
	messages := json.RawMessage(`[{"role":"user","content":"a"}]`)
	if _, err := s.Tokenize(context.Background(), Text{Messages: messages}); err != nil ||
		got != `/tokenize {"messages":`+string(messages)+`}` {
		t.Errorf("%v, %s", err, got)
	}
	for _, c := range []struct {
		status int
		answer string
		words  string
	}{
		{401, "no", "VLLM_API_KEY"},
		{404, `{"message": "The model x does not exist"}`, "does not exist"},
		{200, "<html>", "no tokens"},
		{200, `{"tokens": []}`, "no tokens"},
	} {
		status, answer = c.status, c.answer
		if _, err := s.Tokenize(context.Background(), Text{Prompt: "a"}); err == nil ||
			!strings.Contains(err.Error(), c.words) {
			t.Errorf("%d %s: %v", c.status, c.answer, err)
		}
	}
	server.Close()
	if _, err := s.Tokenize(context.Background(), Text{Prompt: "a"}); err == nil ||
		!strings.HasPrefix(err.Error(), "--vllm: ") {
		t.Errorf("nobody there: %v", err)
	}
}
