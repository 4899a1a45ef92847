package vllm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// maxAnswer bounds the response of a server, in bytes.
const maxAnswer = 64 << 20

// ParseTokens reads token ids: a JSON list, or numbers separated by white space or commas.
func ParseTokens(text string) ([]uint32, error) {
	var tokens []uint32
	if strings.HasPrefix(strings.TrimSpace(text), "[") {
		if err := json.Unmarshal([]byte(text), &tokens); err != nil {
			return nil, fmt.Errorf("tokens: it begins like a JSON list of numbers, but is not one: %w",
				err)
		}
		return tokens, nil
	}
	for word := range strings.FieldsFuncSeq(text, func(r rune) bool {
		return r == ',' || r == ' ' ||
			r == '\n' || r == '\t' || r == '\r'
	}) {
		n, err := strconv.ParseUint(word, 10, 31)
		if err != nil {
			return nil, fmt.Errorf("tokens: %q is not a token id", word)
		}
		tokens = append(tokens, uint32(n))
	}
	return tokens, nil
}

// A Server is a vLLM server.
type Server struct {
	URL string // http://HOST:PORT
	Key string // of its API, or ""
}

// Text is the text of a request to a model: a prompt, or the messages of a chat.
type Text struct {
	Model    string          // the server's name for it, or ""
	Prompt   string          // of a completion
	Messages json.RawMessage // of a chat completion, or nil
}

// Tokenize returns the token ids that the server makes of a request with the text.
func (s *Server) Tokenize(ctx context.Context, t Text) ([]uint32, error) {
	body := map[string]any{"prompt": t.Prompt}
	if t.Messages != nil {
		body = map[string]any{"messages": t.Messages}
	}
	if t.Model != "" {
		body["model"] = t.Model
	}
	b, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimRight(s.URL, "/")+
		"/tokenize", bytes.NewReader(b))
	if err != nil {
		return nil, fmt.Errorf("--vllm: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	if s.Key != "" {
		req.Header.Set("Authorization", "Bearer "+s.Key)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("--vllm: %w", err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err != nil {
		return nil, fmt.Errorf("--vllm: %w", err)
	}
	if resp.StatusCode != http.StatusOK {
		fix := ""
		switch resp.StatusCode {
		case http.StatusUnauthorized, http.StatusForbidden:
			fix = ": set VLLM_API_KEY to the server's key"
		case http.StatusNotFound:
			fix = ": is it a vLLM server, and --model a name that it serves?"
		}
		return nil, fmt.Errorf("--vllm: %s returned %s%s %.200q", req.URL, resp.Status, fix,
			bytes.TrimSpace(answer))
	}
	if len(answer) > maxAnswer {
		return nil, fmt.Errorf("--vllm: %s returned more than %d bytes", req.URL, maxAnswer)
	}
	var out struct {
		Tokens []uint32 `json:"tokens"`
	}
	if err := json.Unmarshal(answer, &out); err != nil {
		return nil, fmt.Errorf("--vllm: %s returned no tokens: %w", req.URL, err)
	}
	if len(out.Tokens) == 0 {
		return nil, errors.New("--vllm: the text has no tokens")
	}
	return out.Tokens, nil
}
