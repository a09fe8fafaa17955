package testenv

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
)

const tokenServiceName = "testenv"

// tokenService gives out Bearer tokens for a registry, by the distribution
// project's token specification: GET with a Basic login, and the OAuth2 POST.
type tokenService struct {
	*server
	jwks   string // file with the public key, for the registry
	users  map[string]User
	signer jose.Signer

	mu     sync.Mutex
	grants []Grant
}

// Grant is a token that was given: who asked, and for which repository.
type Grant struct{ User, Repository string }

func startTokenService(t T, dir string, users map[string]User) *tokenService {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatalf("making the token service's key: %v", err)
	}
	public := jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: key.Public(), KeyID: tokenServiceName}}}
	jwks, err := json.Marshal(public)
	if err != nil {
		t.Fatalf("making the token service's key: %v", err)
	}
	s := &tokenService{jwks: filepath.Join(dir, "jwks.json"), users: users}
	if err := os.WriteFile(s.jwks, jwks, 0o644); err != nil {
		t.Fatalf("writing the token service's key: %v", err)
	}
	s.signer, err = jose.NewSigner(
		jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: key, KeyID: tokenServiceName}}, nil)
	if err != nil {
		t.Fatalf("making the token service's key: %v", err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/token", s.serve)
	s.server = startServer(t, mux)
	return s
}

func (s *tokenService) serve(w http.ResponseWriter, req *http.Request) {
	name, password, ok := req.BasicAuth()
	scopes := req.URL.Query()["scope"]
	if req.Method == http.MethodPost {
		req.Body = http.MaxBytesReader(w, req.Body, 1<<20)
		name, password, ok = req.FormValue("username"), req.FormValue("password"), true
		scopes = strings.Fields(req.FormValue("scope"))
	}
	user, known := s.users[name]
	if ok && (!known || user.Password != password) {
		http.Error(w, `{"details":"incorrect username or password"}`, http.StatusUnauthorized)
		return
	}
	token, err := s.token(name, user, scopes)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(map[string]any{"token": token, "access_token": token, "expires_in": 300})
}

// access is one granted scope, as it stands in a token.
type access struct {
	Type    string   `json:"type"`
	Name    string   `json:"name"`
	Actions []string `json:"actions"`
}

// token returns a signed token with what the user may do of the scopes. Their
// form is repository:NAME:ACTION[,ACTION].
func (s *tokenService) token(name string, user User, scopes []string) (string, error) {
	granted := []access{}
	for _, scope := range scopes {
		kind, rest, _ := strings.Cut(scope, ":")
		repo, actions, _ := strings.Cut(rest, ":")
		s.mu.Lock()
		s.grants = append(s.grants, Grant{name, repo})
		s.mu.Unlock()
		may := name == pusher || strings.HasPrefix(repo, "public/") || name != "" && user.mayPull(repo)
		if !may {
			continue
		}
		a := access{kind, repo, strings.Split(actions, ",")}
		if name != pusher {
			a.Actions = []string{"pull"}
		}
		granted = append(granted, a)
	}
	now := time.Now()
	claims := jwt.Claims{
		Issuer: tokenServiceName, Subject: name, Audience: jwt.Audience{tokenServiceName},
		IssuedAt: jwt.NewNumericDate(now), NotBefore: jwt.NewNumericDate(now), Expiry: jwt.NewNumericDate(now.Add(5 * time.Minute)),
	}
	return jwt.Signed(s.signer).Claims(claims).Claims(map[string]any{"access": granted}).Serialize()
}

func (u User) mayPull(repo string) bool {
	return len(u.Prefixes) == 0 || slices.ContainsFunc(u.Prefixes, func(p string) bool { return strings.HasPrefix(repo, p) })
}
