package secrets

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// form is one kind of secret file: a pattern for the key of the secret, which is the file's name, and how to read it. The
// entries and problems that parse returns have no Source and File yet.
type form struct {
	pattern string
	parse   func(data []byte) ([]entry, []Problem)
	// kubelet is set where the kubelet reads such a file too.
	kubelet bool
}

// forms are the files that are read; a file is of the first form whose pattern fits. The type of a secret is lost when it
// is mounted, so the name decides. Projected volumes need a name of their own for each source: *.json.
var forms = [...]form{
	{".dockerconfigjson", parseDockerConfigJSON, true},
	{".dockercfg", parseDockerCfg, true},
	{"dockerconfigjson", parseDockerConfigJSON, false},
	{"*.json", parseJSON, false}, // config.json, auth.json
}

// noteForm says why pods cannot use a file of another form.
const noteForm = "the kubelet reads .dockerconfigjson and .dockercfg only"

// warnForm is the warning about such a file.
const warnForm = "is used here, but not by pods: " + noteForm

// dockerConfigJSON are the fields that the kubelet decodes (credentialprovider.DockerConfigJSON), the second one without
// a use for it, so that a wrong type there is seen.
type dockerConfigJSON struct {
	Auths       auths             `json:"auths"`
	HTTPHeaders map[string]string `json:"HttpHeaders"`
}

// helpers are the programs that would give the credentials on a user's own machine. They are not run: a secret that
// could start programs would be one that owns the node.
type helpers struct {
	Store string            `json:"credsStore"`
	ByKey map[string]string `json:"credHelpers"`
}

// covers reports whether a program, which is not run, would know the credential of a key.
func (h helpers) covers(key string) bool {
	return h.Store != "" || h.ByKey[key] != ""
}

// auths are the members of an `auths` object in file order. The kubelet decodes them into a map, which leaves the order
// of two keys for one place to chance.
type auths []auth

type auth struct {
	key  string
	body json.RawMessage
}

// authFields are the fields of one entry that the kubelet decodes (credentialprovider.DockerConfigEntry); `email` is
// there to refuse the same wrong types.
type authFields struct {
	Username string `json:"username"`
	Password string `json:"password"`
	Email    string `json:"email"`
	Auth     string `json:"auth"`
}

// tokenFields are the fields of an entry that docker writes and the kubelet does not know. They are read apart from the
// others, so that a wrong type in them costs nothing that the kubelet would use.
type tokenFields struct {
	IdentityToken string `json:"identitytoken"`
	RegistryToken string `json:"registrytoken"`
}

// tokenUser is the user name by which credential helpers mark an identity token.
const tokenUser = "<token>"

var errAuthsKind = errors.New(`"auths" is not an object`)

// UnmarshalJSON appends, so that a repeated `auths` adds to the first and null drops what was there, as for a map.
func (a *auths) UnmarshalJSON(data []byte) error {
	if string(data) == "null" {
		*a = nil
		return nil
	}
	decoder := json.NewDecoder(bytes.NewReader(data))
	if token, err := decoder.Token(); err != nil || token != json.Delim('{') {
		return errAuthsKind
	}
	for decoder.More() {
		key, err := decoder.Token()
		if err != nil {
			return err
		}
		next := auth{key: key.(string)} // inside an object the decoder gives no other kind here
		if err := decoder.Decode(&next.body); err != nil {
			return err
		}
		*a = append(*a, next)
	}
	return nil
}

// lastWins drops all but the last of the members with one key.
func (a auths) lastWins() auths {
	seen := make(map[string]bool, len(a))
	var kept auths
	for _, one := range slices.Backward(a) {
		if !seen[one.key] {
			seen[one.key] = true
			kept = append(kept, one)
		}
	}
	slices.Reverse(kept)
	return kept
}

// parseDockerConfigJSON reads a `.dockerconfigjson`: the entries under `auths`, each on its own. The kubelet lets one
// bad entry spoil all secrets of the pod; here it costs itself only.
func parseDockerConfigJSON(data []byte) (entries []entry, problems []Problem) {
	if reason := notJSON(data); reason != "" {
		return nil, []Problem{{Message: reason}}
	}
	var file dockerConfigJSON
	if err := json.Unmarshal(data, &file); err != nil {
		// A wrong type in one place does not keep the decoder from filling in the others.
		problems = append(problems, Problem{Message: jsonReason(err, "file") + "; the kubelet refuses this secret"})
	} else if len(file.Auths) == 0 {
		if isFlatMap(data) {
			return parseFlatMap(data, "a flat map in a dockerconfigjson: taken as it is meant, the kubelet finds no entry in it")
		}
		problems = append(problems, whyEmpty(data)...)
	}
	var programs helpers
	_ = json.Unmarshal(data, &programs) // the kubelet does not read them, so they cannot make a file bad
	entries, more := file.Auths.parse(programs)
	return entries, append(problems, more...)
}

// parseDockerCfg reads a legacy `.dockercfg`, which is the bare map of entries.
func parseDockerCfg(data []byte) ([]entry, []Problem) {
	if reason := notJSON(data); reason != "" {
		return nil, []Problem{{Message: reason}}
	}
	var file dockerConfigJSON
	if json.Unmarshal(data, &file) == nil && len(file.Auths) > 0 && !isFlatMap(data) {
		entries, problems := parseDockerConfigJSON(data)
		note := Problem{Message: "a config.json in a dockercfg: taken as it is meant, the kubelet finds no usable entry in it"}
		return noted(entries, note.Message), append(problems, note)
	}
	return parseFlatMap(data, "")
}

// parseFlatMap reads the entries of a bare map. Where it is not what the file's name says, note tells so.
func parseFlatMap(data []byte, note string) ([]entry, []Problem) {
	var file auths
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, []Problem{{Message: jsonReason(err, "file")}}
	}
	entries, problems := file.parse(helpers{})
	if note != "" {
		entries, problems = noted(entries, note), append(problems, Problem{Message: note})
	}
	return entries, problems
}

// parseJSON reads a file whose name says only that it is JSON.
func parseJSON(data []byte) ([]entry, []Problem) {
	if isServiceAccount(data) {
		return nil, []Problem{{Message: "a Google service account's key: say for which registry it is (--secret-registry)"}}
	}
	return parseDockerConfigJSON(data)
}

// isServiceAccount tells the key file of a Google service account.
func isServiceAccount(data []byte) bool {
	var key struct {
		Type string `json:"type"`
	}
	return json.Unmarshal(data, &key) == nil && key.Type == "service_account"
}

// noted marks entries as ones that the kubelet does not find.
func noted(entries []entry, note string) []entry {
	for i := range entries {
		entries[i].credential.Note = cmp.Or(entries[i].credential.Note, note)
	}
	return entries
}

// parse reads all entries, the bad ones into problems.
func (a auths) parse(programs helpers) (entries []entry, problems []Problem) {
	for _, one := range a.lastWins() {
		made, warnings, err := one.parse(programs)
		if err != nil {
			warnings = []string{err.Error() + ": entry dropped"}
		}
		entries = append(entries, made...)
		for _, message := range warnings {
			problems = append(problems, Problem{Key: displayKey(one.key), Message: message})
		}
	}
	return entries, problems
}

// notJSON says in a helpful way what is wrong with a file that some tool spoiled before it came here.
func notJSON(data []byte) string {
	switch {
	case len(bytes.TrimSpace(data)) == 0:
		return "the file is empty"
	case bytes.HasPrefix(data, []byte("\xef\xbb\xbf")):
		return "the file begins with a byte order mark (BOM), which JSON does not allow"
	case bytes.HasPrefix(bytes.TrimSpace(data), []byte("eyJ")): // base64 of `{"`
		return "looks base64-encoded twice"
	}
	return ""
}

// jsonReason puts an error of encoding/json in words that quote nothing of the input.
func jsonReason(err error, what string) string {
	var syntax *json.SyntaxError
	var kind *json.UnmarshalTypeError
	switch {
	case errors.Is(err, errAuthsKind):
		return err.Error()
	case errors.As(err, &syntax):
		return fmt.Sprintf("not valid JSON at byte %d", syntax.Offset)
	case errors.As(err, &kind):
		// Value is the JSON kind, in some cases with the number after it. Field begins with a name of our own struct;
		// what follows a dot is a key of the file.
		found, _, _ := strings.Cut(kind.Value, " ")
		if field, _, _ := strings.Cut(kind.Field, "."); field != "" {
			what = fmt.Sprintf("%q", field)
		}
		return fmt.Sprintf("%s is or holds a JSON %s where another type belongs", what, found)
	}
	return what + " cannot be decoded"
}

// whyEmpty looks for what a valid file without entries has in place of them.
func whyEmpty(data []byte) []Problem {
	var programs helpers
	if json.Unmarshal(data, &programs) == nil && (programs.Store != "" || len(programs.ByKey) > 0) {
		return []Problem{{Message: "holds no credentials, helpers are not run"}}
	}
	return nil
}

// isFlatMap tells the content of a legacy `.dockercfg`, which is the bare map of entries.
func isFlatMap(data []byte) bool {
	var members map[string]json.RawMessage
	if json.Unmarshal(data, &members) != nil {
		return false
	}
	for name, body := range members {
		var fields authFields
		isEntry := json.Unmarshal(body, &fields) == nil && fields != authFields{}
		if isEntry && !strings.EqualFold(name, "auths") {
			return true
		}
	}
	return false
}

// parse reads one entry. It may hold several credentials, which are tried in this order: tokens, as docker does, then
// user and password. Warnings are about an entry that is kept.
func (a auth) parse(programs helpers) (made []entry, warnings []string, _ error) {
	username, password, note, warnings, err := a.login()
	if err != nil {
		return nil, nil, err
	}
	var tokens tokenFields
	_ = json.Unmarshal(a.body, &tokens)
	if username == tokenUser {
		tokens.IdentityToken, username, password = password, "", ""
	}
	if tokens != (tokenFields{}) {
		warnings = append(warnings, "holds a token, which the kubelet does not read: a pod cannot pull with it")
	}
	add := func(c Credential) {
		var e entry
		if e, err = newEntry(a.key, c); err == nil {
			made = append(made, e)
		}
	}
	if tokens.RegistryToken != "" {
		add(Credential{Password: NewSecret(tokens.RegistryToken), RegistryToken: true, Note: noteToken})
	}
	if tokens.IdentityToken != "" {
		add(Credential{Password: NewSecret(tokens.IdentityToken), Note: noteToken})
	}
	switch empty := username == "" && password == ""; {
	case empty && programs.covers(a.key):
		warnings = append(warnings, "is for a credential helper, which cannot run in a pull secret; the kubelet ignores helpers too")
	case tokens == (tokenFields{}) || password != "": // az acr login writes a user without a password beside the token
		add(Credential{Username: username, Password: NewSecret(password), Note: note})
	}
	return made, warnings, err
}

const noteToken = "the kubelet does not read tokens"

// login reads the user and password of an entry as the kubelet does. The note says what the kubelet refuses.
func (a auth) login() (username, password, note string, warnings []string, err error) {
	var fields authFields
	if err := json.Unmarshal(a.body, &fields); err != nil {
		return "", "", "", nil, errors.New(jsonReason(err, "entry"))
	}
	username, password = fields.Username, fields.Password
	// A non-empty auth overrides the plain fields, even one that does not decode (kubelet: DockerConfigEntry).
	if fields.Auth != "" {
		var decoded string
		if decoded, note, err = decodeAuth(fields.Auth); err != nil {
			return "", "", "", nil, err
		}
		if note != "" {
			warnings = append(warnings, note)
		}
		// Split at the first colon: the password may hold more of them (`_json_key` and its JSON).
		var colon bool
		if username, password, colon = strings.Cut(decoded, ":"); !colon {
			return "", "", "", nil, errors.New("auth holds no colon between user and password")
		}
		if differs(fields.Username, username) || differs(fields.Password, password) {
			warnings = append(warnings, "username or password differ from auth: auth is used, as the kubelet does")
		}
	}
	return username, password, note, append(warnings, hints(username, password)...), nil
}

// hints are about logins that are known to go wrong.
func hints(username, password string) (warnings []string) {
	if strings.HasSuffix(password, "\n") {
		warnings = append(warnings, "the password ends in a newline (echo without -n?): used as it is")
	}
	switch {
	case username == "robot", strings.HasPrefix(username, "robot") && strings.HasSuffix(username, "$"):
		warnings = append(warnings, "the user ends before a $: was robot$NAME expanded by a shell?")
	case username == "_json_key" && !json.Valid([]byte(password)):
		warnings = append(warnings, "the user is _json_key, but the password is not JSON")
	}
	return warnings
}

// differs reports whether a plain field was written and says something else than auth.
func differs(plain, decoded string) bool {
	return plain != "" && plain != decoded
}

// decodeAuth decodes base64 with padding if it ends in "=" and without otherwise (kubelet:
// decodeDockerConfigFieldAuth). With a warning it takes two things that the kubelet refuses: white space around the
// value and the URL-safe alphabet.
func decodeAuth(auth string) (decoded, warning string, _ error) {
	trimmed := strings.TrimSpace(auth)
	standard, urlSafe := base64.RawStdEncoding, base64.RawURLEncoding
	if strings.HasSuffix(trimmed, "=") {
		standard, urlSafe = base64.StdEncoding, base64.URLEncoding
	}
	for _, try := range []struct {
		encoding *base64.Encoding
		text     string
		warning  string
	}{
		{standard, auth, ""},
		{standard, trimmed, "auth has white space around it: trimmed here, the kubelet refuses it"},
		{urlSafe, trimmed, "auth is in URL-safe base64: accepted here, the kubelet refuses it"},
	} {
		if decoded, err := try.encoding.DecodeString(try.text); err == nil {
			return string(decoded), try.warning, nil
		}
	}
	if strings.Contains(auth, ":") {
		return "", "", errors.New("auth holds user:password as plain text, not as base64")
	}
	return "", "", errors.New("auth is not base64")
}
